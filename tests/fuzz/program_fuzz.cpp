#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "entries.h"
#include "programs.h"

/// The bytes are the generator's choices. After the last byte it makes the lowest choices.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::size_t at = 0;
  const auto choose = [&](std::uint64_t low, std::uint64_t high) {
    std::uint64_t drawn = 0;
    for (std::uint64_t left = high - low; left > 0 && at < size; left >>= 8) {
      drawn = (drawn << 8) | data[at++];
    }
    return high - low == ~std::uint64_t{0} ? drawn : low + drawn % (high - low + 1);
  };
  const std::string program = torch_ckpt::test::metadata_program(choose, 1 << 14);
  const auto broken = torch_ckpt::test::use_metadata_within_cost(std::as_bytes(std::span(program)));
  if (broken.empty()) return 0;
  std::fprintf(stderr, "%s\n", broken.c_str());
  std::abort();
}
