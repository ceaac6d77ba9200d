// Element types that travel. The codes are part of the meta format: append, never renumber.
#pragma once
#include <cstdint>

namespace tl {

enum class DType : uint8_t {
  boolean, int8, int16, int32, int64, uint8, uint16, uint32, uint64,
  float16, float32, float64, longdouble, bfloat16,
  float8_e3m4, float8_e4m3, float8_e4m3b11fnuz, float8_e4m3fn,
  float8_e4m3fnuz, float8_e5m2, float8_e5m2fnuz, float8_e8m0fnu,
  complex32, complex64, complex128, clongdouble,
  count,
};

struct DTypeInfo {
  const char* name;
  uint8_t itemsize;
  uint8_t dl_code;  // DLPack type code and bits; 0 bits: DLPack has no such type
  uint8_t dl_bits;
};

inline constexpr DTypeInfo dtype_table[] = {
    {"bool", 1, 6, 8},
    {"int8", 1, 0, 8}, {"int16", 2, 0, 16}, {"int32", 4, 0, 32}, {"int64", 8, 0, 64},
    {"uint8", 1, 1, 8}, {"uint16", 2, 1, 16}, {"uint32", 4, 1, 32}, {"uint64", 8, 1, 64},
    {"float16", 2, 2, 16}, {"float32", 4, 2, 32}, {"float64", 8, 2, 64},
    {"longdouble", sizeof(long double), 0, 0}, {"bfloat16", 2, 4, 16},
    {"float8_e3m4", 1, 7, 8}, {"float8_e4m3", 1, 8, 8}, {"float8_e4m3b11fnuz", 1, 9, 8}, {"float8_e4m3fn", 1, 10, 8},
    {"float8_e4m3fnuz", 1, 11, 8}, {"float8_e5m2", 1, 12, 8},
    {"float8_e5m2fnuz", 1, 13, 8}, {"float8_e8m0fnu", 1, 14, 8},
    {"complex32", 4, 5, 32}, {"complex64", 8, 5, 64}, {"complex128", 16, 5, 128},
    {"clongdouble", 2 * sizeof(long double), 0, 0},
};
inline constexpr int dtype_count = static_cast<int>(DType::count);
static_assert(sizeof(dtype_table) / sizeof(dtype_table[0]) == dtype_count, "one row for each dtype");

inline const DTypeInfo& info(DType dtype) { return dtype_table[static_cast<int>(dtype)]; }
inline uint64_t itemsize(DType dtype) { return info(dtype).itemsize; }

}  // namespace tl
