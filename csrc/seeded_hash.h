#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <string_view>

namespace torch_ckpt {

/// Hashes for tables of untrusted keys. Each process has a random seed, so that an attacker cannot
/// choose names with equal hashes.
class SeededHash {
 public:
  std::uint64_t operator()(std::string_view bytes) const {
    std::uint64_t state = kSeed ^ bytes.size();
    while (bytes.size() >= 8) {
      state = mixed(state ^ word(bytes.data(), 8));
      bytes.remove_prefix(8);
    }
    return mixed(state ^ word(bytes.data(), bytes.size()));
  }
  std::uint64_t operator()(std::span<const std::int64_t> numbers) const {
    std::uint64_t state = kSeed ^ numbers.size();
    for (const std::int64_t number : numbers) {
      state = mixed(state ^ static_cast<std::uint64_t>(number));
    }
    return mixed(state);
  }
  std::uint64_t operator()(std::uint64_t number) const { return mixed(kSeed ^ number); }

 private:
  // Initialized when the library is loaded. With lazy initialization, a child that is forked while
  // a thread initializes it would wait for that thread forever.
  static inline const std::uint64_t kSeed = [] {
    std::random_device device;
    return (std::uint64_t{device()} << 32) | device();
  }();
  static std::uint64_t word(const char* bytes, std::size_t count) {
    std::uint64_t value = 0;
    if (count > 0) std::memcpy(&value, bytes, count);
    return value;
  }
  /// The finalizer of SplitMix64 (G. Steele, D. Lea, C. Flood 2014).
  static std::uint64_t mixed(std::uint64_t value) {
    value = (value + 0x9e3779b97f4a7c15) ^ kSeed;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
    value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
    return value ^ (value >> 31);
  }
};

}  // namespace torch_ckpt
