#include "crc32c.h"
#include "hmac.h"
#include "python/bind.h"
#include "python/gil.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tl::python {

namespace {

constexpr uint64_t kLong = 64 << 10;  // bytes that take microseconds: let others have the interpreter meanwhile

uint32_t crc32c_at(uintptr_t address, uint64_t nbytes, uint32_t crc) {
  auto* data = reinterpret_cast<const void*>(address);
  if (nbytes < kLong) return crc32c(crc, data, nbytes);
  Released released;
  return crc32c(crc, data, nbytes);
}

std::string_view text(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

}  // namespace

void bind_digest(nb::module_& module) {
  module.def("crc32c", crc32c_at, "address"_a, "nbytes"_a, "crc"_a = 0,
             "The checksum of `nbytes` of memory at `address` after the bytes that `crc` is the checksum of.");
  module.def("crc32c_combine", crc32c_combine, "first"_a, "second"_a, "nbytes"_a,
             "The checksum of two parts in a row from theirs; `nbytes` is the length of the second.");
  module.def("hmac_sha256", [](const nb::bytes& key, const nb::bytes& message) {
    const Digest digest = hmac_sha256(text(key), text(message));
    return nb::bytes(digest.data(), digest.size());
  }, "key"_a, "message"_a, "HMAC-SHA-256 (RFC 2104), 32 bytes.");
}

}  // namespace tl::python
