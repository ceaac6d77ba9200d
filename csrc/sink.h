// Where the next bytes of a stream go.
#pragma once
#include <cstdint>

namespace tl {

struct Sink {
  char* to;  // null: nowhere
  uint64_t nbytes;
};

}  // namespace tl
