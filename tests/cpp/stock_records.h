#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "format/tensor_pickle.h"

namespace torch_ckpt::test {

// The record that stock torch wrote for one tensor. It has only the sizes and CRC-32s of the bytes
// around the payload; stock_scalar_head() and _tail() return these bytes of one record.
struct StockRecord {
  std::string name;
  std::string_view dtype;
  std::vector<std::uint64_t> sizes;
  std::vector<std::uint64_t> strides;
  bool conj = false;
  bool neg = false;
  std::string_view pickle;
  std::uint64_t payload_bytes = 0;
  std::uint32_t payload_crc = 0;
  std::uint64_t head_bytes = 0;
  std::uint32_t head_crc = 0;
  std::uint64_t tail_bytes = 0;
  std::uint32_t tail_crc = 0;

  format::TensorHeader header() const {
    return {format::find_dtype(dtype), payload_bytes, 0, sizes, strides, conj, neg};
  }
};

inline std::ostream& operator<<(std::ostream& out, const StockRecord& record) {
  return out << record.name;
}

const std::vector<StockRecord>& stock_records();

/// The bytes of torch.tensor(3)'s record before and after its payload of eight bytes.
std::string_view stock_scalar_head();
std::string_view stock_scalar_tail();

}  // namespace torch_ckpt::test
