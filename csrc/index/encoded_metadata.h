#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "index/metadata_seal.h"

namespace torch_ckpt::index {

/// The contents of a `.metadata` file. Saves with the same plan share the parts that do not differ.
class EncodedMetadata {
 public:
  EncodedMetadata() = default;  // without pieces, until add() is called
  explicit EncodedMetadata(std::string contents) {
    add(std::make_shared<const std::string>(std::move(contents)));
  }

  void add(std::shared_ptr<const std::string> part) {
    const std::string_view all = *part;
    add(std::move(part), all);
  }
  /// Adds `piece`, which lies within `part`.
  void add(std::shared_ptr<const std::string> part, std::string_view piece) {
    if (parts_.empty() || parts_.back() != part) parts_.push_back(std::move(part));
    pieces_.push_back(piece);
    bytes_ += piece.size();
  }

  std::span<const std::string_view> pieces() const { return pieces_; }
  std::size_t bytes() const { return bytes_; }
  /// The seal, which lies within the last piece; all of that piece if it is shorter.
  std::string_view seal() const {
    const std::string_view last = pieces_.back();
    return last.substr(last.size() - std::min(last.size(), kSealBytes));
  }

 private:
  std::vector<std::shared_ptr<const std::string>> parts_;
  std::vector<std::string_view> pieces_;
  std::size_t bytes_ = 0;
};

}  // namespace torch_ckpt::index
