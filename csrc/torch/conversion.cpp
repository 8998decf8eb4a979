#include "torch/conversion.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>

#include "error.h"
#include "format/convert.h"
#include "torch/tensor_checks.h"

namespace torch_ckpt::tensors {
namespace {

// Number of elements to convert at a time. So few that ATen does not start threads of its own:
// several engine threads are already running.
constexpr std::size_t kAtOnce = 1024;
constexpr std::size_t kMaxItemBytes = 16;

using Buffer = std::array<std::byte, kAtOnce * kMaxItemBytes>;

at::Tensor tensor_in(Buffer& buffer, std::size_t count, at::ScalarType dtype) {
  return at::from_blob(buffer.data(), {static_cast<std::int64_t>(count)},
                       at::TensorOptions().dtype(dtype));
}

void copy_by_torch(std::byte* out, const std::byte* in, std::size_t count, at::ScalarType from,
                   at::ScalarType to, bool conj, bool neg) {
  alignas(64) Buffer source;
  alignas(64) Buffer target;
  const std::size_t in_bytes = c10::elementSize(from);
  const std::size_t out_bytes = c10::elementSize(to);
  while (count > 0) {
    const std::size_t part = std::min(count, kAtOnce);
    std::memcpy(source.data(), in, part * in_bytes);
    at::Tensor values = tensor_in(source, part, from);
    if (conj) values = values.conj();
    if (neg) values = values._neg_view();
    tensor_in(target, part, to).copy_(values);
    std::memcpy(out, target.data(), part * out_bytes);
    in += part * in_bytes;
    out += part * out_bytes;
    count -= part;
  }
}

}  // namespace

staging::Convert conversion_between(const std::string& name, at::ScalarType from, at::ScalarType to,
                                    bool conj, bool neg) {
  if (!conj && !neg) {
    const format::Dtype* const source = dtype_of(from);
    const format::Dtype* const target = dtype_of(to);
    if (source != nullptr && target != nullptr) {
      if (const format::Conversion known = format::find_conversion(*source, *target)) return known;
    }
  }
  const auto convert = [=](std::byte* out, const std::byte* in, std::size_t count) {
    copy_by_torch(out, in, count, from, to, conj, neg);
  };
  try {
    // Check this before the load, so that the error can name the item.
    const std::array<std::byte, kMaxItemBytes> zero{};
    std::array<std::byte, kMaxItemBytes> out{};
    convert(out.data(), zero.data(), 1);
  } catch (const std::exception&) {
    throw Failure(format_error(Errc::invalid_argument, name + ": torch cannot convert " +
                                                           name_of(from) + " to " + name_of(to)));
  }
  return convert;
}

}  // namespace torch_ckpt::tensors
