// What can go wrong in the core, by what the caller does next. The binding layer turns each into its Python class.
#pragma once
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace tl {

enum class Fault { closed, lost, stale, timeout, cancelled, no_room, corrupt, refused, interrupted, transport };

class Error : public std::runtime_error {
 public:
  Error(Fault fault, const std::string& what, int code = 0) : std::runtime_error(what), fault(fault), code(code) {}
  Fault fault;
  int code;  // errno, or 0
};

[[noreturn]] inline void throw_errno(const std::string& what) {
  int code = errno;
  throw Error(Fault::transport, what + ": " + std::strerror(code), code);
}

}  // namespace tl
