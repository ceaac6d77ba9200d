// The part of DLPack 1.x that is used here, declared from its specification (https://dmlc.github.io/dlpack/latest/).
#pragma once
#include <cstdint>

namespace tl::dlpack {

inline constexpr uint32_t major_version = 1;
inline constexpr int32_t device_cpu = 1, device_cuda_host = 3;  // the second is page-locked memory of the host

struct Version {
  uint32_t major, minor;
};
struct Device {
  int32_t type, id;
};
struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // elements
  uint64_t byte_offset;
};

struct Managed {  // capsule "dltensor"
  Tensor tensor;
  void* context;
  void (*deleter)(Managed*);
};

struct ManagedVersioned {  // capsule "dltensor_versioned"
  Version version;
  void* context;
  void (*deleter)(ManagedVersioned*);
  uint64_t flags;
  Tensor tensor;
};

// `torch.Tensor.__dlpack_c_exchange_api__`, a capsule named "dlpack_exchange_api". All need the GIL; -1 and a Python
// error: failed.
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  void* allocate;
  int (*export_managed)(void* object, ManagedVersioned** out);
  int (*import_managed)(ManagedVersioned* tensor, void** out_object);  // takes the tensor over
  int (*borrow)(void* object, Tensor* out);  // valid while the object is unchanged; may be null
  void* current_stream;
};

}  // namespace tl::dlpack
