#include "torch/fingerprint.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstddef>
#include <span>

#include "format/crc32.h"
#include "python/released_gil.h"
#include "torch/tensor_checks.h"

namespace py = pybind11;

namespace torch_ckpt::tensors {
namespace {

constexpr std::uint64_t kSampleBytes = 64 << 10;
constexpr std::uint64_t kStripes = 16;

// Elements that are copied to the host at once.
constexpr std::int64_t kPieceBytes = 64 << 20;

/// Returns the elements as integers, because some dtypes can only be copied.
py::object as_integers(const Tensor& tensor) {
  const auto object = py::reinterpret_steal<py::object>(tensor.to_python());
  const py::object plain = object.attr("detach")().attr("resolve_conj")().attr("resolve_neg")();
  const std::size_t bytes = tensor.item_bytes();
  if (bytes > 8) return plain;
  const char* const name = bytes == 1   ? "uint8"
                           : bytes == 2 ? "int16"
                           : bytes == 4 ? "int32"
                                        : "int64";
  return plain.attr("view")(py::module_::import("torch").attr(name));
}

std::uint32_t crc_of_pieces(const py::object& elements, std::int64_t count,
                            std::size_t item_bytes) {
  // Do not flatten by view() or reshape(): they keep the stride of a dimension of size 1, which can
  // be any number.
  const py::object flat =
      elements.attr("contiguous")().attr("as_strided")(py::make_tuple(count), py::make_tuple(1));
  const std::int64_t step = kPieceBytes / static_cast<std::int64_t>(item_bytes);
  std::uint32_t crc = 0;
  for (std::int64_t begin = 0; begin < count; begin += step) {
    const std::int64_t length = std::min(step, count - begin);
    const Tensor piece = Tensor::of(flat.attr("narrow")(0, begin, length).attr("cpu")().ptr());
    crc = format::crc32(crc, std::span(piece.data(), piece.nbytes()));
  }
  return crc;
}

/// Gathers the elements that format::crc32_of_sample reads.
py::object sample_of(const py::object& elements, std::int64_t count, std::size_t item_bytes) {
  const auto length = static_cast<std::int64_t>(kSampleBytes / kStripes / item_bytes);
  const std::int64_t last = count - length;
  py::list begins;
  for (std::uint64_t stripe = 0; stripe < kStripes; ++stripe) {
    begins.append(last * static_cast<std::int64_t>(stripe) / (kStripes - 1));
  }
  const py::module_ torch = py::module_::import("torch");
  const py::object device = elements.attr("device");
  const py::object rows = torch.attr("tensor")(begins, py::arg("device") = device);
  const py::object columns = torch.attr("arange")(length, py::arg("device") = device);
  return torch.attr("take")(elements, rows.attr("unsqueeze")(1) + columns);
}

}  // namespace

std::uint32_t fingerprint_of(const Tensor& tensor, bool whole) {
  if (!is_plain(tensor)) return 0;
  if (tensor.is_cpu() && tensor.is_contiguous() && is_dense(tensor)) {
    const std::span memory(tensor.data(), tensor.nbytes());
    if (whole) return format::crc32(0, memory);
    return format::crc32_of_sample(memory, {tensor.item_bytes(), kSampleBytes, kStripes});
  }
  const python::EnsuredGil gil;
  py::object elements = as_integers(tensor);
  std::int64_t count = tensor.numel();
  if (!whole && tensor.nbytes() > kSampleBytes) {
    elements = sample_of(elements, count, tensor.item_bytes());
    count = kSampleBytes / tensor.item_bytes();
  }
  return crc_of_pieces(elements, count, tensor.item_bytes());
}

}  // namespace torch_ckpt::tensors
