#include "torch/conversion.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>

#include "error.h"
#include "format/convert.h"
#include "torch/tensor.h"

namespace torch_ckpt::tensors {
namespace {

// Number of elements to convert at a time. So few that ATen does not start threads of its own:
// several engine threads are already running.
constexpr std::size_t kAtOnce = 1024;
constexpr std::size_t kMaxItemBytes = 16;

using Buffer = std::array<std::byte, kAtOnce * kMaxItemBytes>;

Tensor tensor_in(const Buffer& buffer, std::size_t count, ScalarType dtype) {
  const std::int64_t size[] = {static_cast<std::int64_t>(count)};
  const std::int64_t stride[] = {1};
  return Tensor::on_memory(buffer.data(), size, stride, dtype, nullptr);
}

void copy_by_torch(std::byte* out, const std::byte* in, std::size_t count, ScalarType from,
                   ScalarType to, bool conj, bool neg) {
  alignas(64) Buffer source;
  alignas(64) Buffer target;
  const std::size_t in_bytes = from.item_bytes();
  const std::size_t out_bytes = to.item_bytes();
  while (count > 0) {
    const std::size_t part = std::min(count, kAtOnce);
    std::memcpy(source.data(), in, part * in_bytes);
    tensor_in(target, part, to).copy_from(tensor_in(source, part, from).lazily(conj, neg));
    std::memcpy(out, target.data(), part * out_bytes);
    in += part * in_bytes;
    out += part * out_bytes;
    count -= part;
  }
}

}  // namespace

staging::Convert conversion_between(const std::string& name, ScalarType from, ScalarType to,
                                    bool conj, bool neg) {
  if (!conj && !neg) {
    const format::Dtype* const source = from.known();
    const format::Dtype* const target = to.known();
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
                                                           from.name() + " to " + to.name()));
  }
  return convert;
}

}  // namespace torch_ckpt::tensors
