#include "format/dtype.h"

namespace torch_ckpt::format {
namespace {

constexpr Dtype kDtypes[] = {
    {"float32", "FloatStorage", 4},
    {"float64", "DoubleStorage", 8},
    {"float16", "HalfStorage", 2},
    {"bfloat16", "BFloat16Storage", 2},
    {"int64", "LongStorage", 8},
    {"int32", "IntStorage", 4},
    {"int16", "ShortStorage", 2},
    {"int8", "CharStorage", 1},
    {"uint8", "ByteStorage", 1},
    {"bool", "BoolStorage", 1},
    {"complex64", "ComplexFloatStorage", 8},
    {"complex128", "ComplexDoubleStorage", 16},
    {"uint16", "", 2},
    {"uint32", "", 4},
    {"uint64", "", 8},
    {"complex32", "", 4},
    {"bcomplex32", "", 4},
    {"float8_e4m3fn", "", 1},
    {"float8_e4m3fnuz", "", 1},
    {"float8_e5m2", "", 1},
    {"float8_e5m2fnuz", "", 1},
    {"float8_e8m0fnu", "", 1},
    {"float4_e2m1fn_x2", "", 1},
    {"bits8", "", 1},
    {"bits16", "", 2},
    {"bits1x8", "", 1},
    {"bits2x4", "", 1},
    {"bits4x2", "", 1},
};

}  // namespace

const Dtype* find_dtype(std::string_view name) {
  for (const Dtype& dtype : kDtypes) {
    if (dtype.name == name) return &dtype;
  }
  return nullptr;
}

const Dtype* find_dtype_of_storage(std::string_view storage) {
  if (storage.empty()) return nullptr;
  for (const Dtype& dtype : kDtypes) {
    if (dtype.storage == storage) return &dtype;
  }
  return nullptr;
}

}  // namespace torch_ckpt::format
