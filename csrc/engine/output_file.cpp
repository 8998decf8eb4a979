#include "engine/output_file.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "checked_math.h"
#include "engine/new_file.h"

namespace torch_ckpt::engine {

Result<> OutputFile::open(DirectIo direct_io) {
  const os::Directory* const directory = folder_.directory();
  if (directory == nullptr) return {};
  auto file = create_file(*directory, name_, bytes_, direct_io, image_.is_scattered());
  if (!file) return file.error();
  if (!image_.is_scattered()) {
    is_created_ = true;
    auto identity = file->identity();
    if (!identity) return identity.error();
    identity_ = *identity;
  }
  if (image_.is_scattered() && file->is_direct()) {
    auto edges = directory->open_or_create(name_, os::IoMode::buffered);
    if (!edges) return edges.error();
    edges_ = std::move(*edges);
  }
  TC_TRY(file->reserve(bytes_));
  if (image_.is_scattered()) {
    // Where space cannot be reserved. A file that ends before a part that is written through the
    // page cache could lose the bytes of another rank in the same page.
    TC_TRY(file->truncate(bytes_));
  }
  file_ = std::move(*file);
  return {};
}

// Writes segments of a file that several ranks write, in ascending order. Joins segments that are
// adjacent both in the file and in memory, and collects short ones in the collective buffer.
class OutputFile::Parts {
 public:
  explicit Parts(OutputFile& file) : file_(file) {}

  /// Writes the segment that begins at `offset` in the file. Returns how many bytes of it are
  /// taken: fewer than all if the write waits for other ranks or has failed.
  std::uint64_t add(std::uint64_t offset, std::span<const std::byte> segment) {
    std::uint64_t taken = 0;
    while (taken < segment.size() && status_) {
      const std::uint64_t at = offset + taken;
      auto bytes = segment.subspan(taken);
      if (enter_window(at)) {
        if (access_.kind == Kind::wait) break;
        bytes = bytes.first(std::min<std::uint64_t>(bytes.size(), window_->end - at));
      }
      if (window_ && access_.kind == Kind::block) {
        std::memcpy(access_.block.data() + (at - window_->begin), bytes.data(), bytes.size());
        collected_ += bytes.size();
      } else {
        join(at, bytes);
      }
      taken += bytes.size();
    }
    return taken;
  }

  /// Writes all blocks that are ready.
  Result<> write_ready_blocks() {
    while (status_ && write_ready_block()) {
    }
    return status_;
  }

  /// Completes the writes.
  Result<> end() {
    leave_window();
    write(joined_, begin_);
    return status_;
  }

 private:
  using Kind = CollectiveBuffer::Access::Kind;

  /// Returns true if the offset is in a window of the collective buffer, which is then window_.
  bool enter_window(std::uint64_t offset) {
    if (window_ && window_->begin <= offset && offset < window_->end) return true;
    leave_window();
    CollectiveBuffer* const buffer = file_.collective_;
    if (buffer == nullptr) return false;
    window_ = buffer->window_at(file_.number_, offset);
    if (!window_) return false;
    const auto since = file_.waiting_since_.value_or(CollectiveBuffer::Clock::now());
    do {
      access_ = buffer->access(*window_, since);
    } while (access_.kind == Kind::wait && status_ && write_ready_block());
    file_.waiting_since_ = access_.kind == Kind::wait ? std::optional(since) : std::nullopt;
    return true;
  }

  /// Returns false if no block is ready.
  bool write_ready_block() {
    const auto ready = file_.collective_->take_ready(file_.number_);
    if (!ready) return false;
    write(ready->bytes, ready->window.begin);
    if (status_) file_.collective_->release(*ready);
    return true;
  }

  void leave_window() {
    if (collected_ > 0) file_.collective_->add(*window_, std::exchange(collected_, 0));
    window_.reset();
  }

  void join(std::uint64_t offset, std::span<const std::byte> bytes) {
    if (offset == begin_ + joined_.size() && bytes.data() == joined_.data() + joined_.size()) {
      joined_ = std::span(joined_.data(), joined_.size() + bytes.size());
      return;
    }
    write(joined_, begin_);
    begin_ = offset;
    joined_ = bytes;
  }

  void write(std::span<const std::byte> bytes, std::uint64_t offset) {
    if (status_ && !bytes.empty()) status_ = file_.write_segment(bytes, offset);
  }

  OutputFile& file_;
  Result<> status_;
  std::span<const std::byte> joined_;
  std::uint64_t begin_ = 0;  // of joined_, in the file
  std::optional<CollectiveBuffer::Window> window_;
  CollectiveBuffer::Access access_;  // to window_
  std::uint64_t collected_ = 0;      // bytes copied to the window's block, but not counted yet
};

bool OutputFile::is_collective(std::uint64_t offset, std::size_t bytes) const {
  if (collective_ == nullptr) return false;
  const auto& items = image_.items();
  for (auto item = image_.first_after(offset); item != items.end(); ++item) {
    if (item->offset >= offset + bytes) return false;
    // A range contains all bytes of a part, or none.
    const PartPlace& place = *item->place;
    if (collective_->window_at(number_, place.tensor + place.runs.begin())) return true;
  }
  return false;
}

Result<std::uint64_t> OutputFile::write(const staging::Chunk& chunk, std::size_t bytes,
                                        std::uint64_t offset, std::uint64_t written) {
  if (!image_.is_scattered()) {
    TC_TRY(write_image(chunk, bytes, offset));
    return bytes;
  }
  Parts parts(*this);
  std::uint64_t added = bytes;  // unless a segment is not taken completely
  image_.for_each_segment(offset + written, offset + bytes,
                          [&](std::uint64_t at, std::uint64_t in_image, std::uint64_t count) {
                            if (added < bytes) return;
                            const auto segment = chunk.bytes().subspan(in_image - offset, count);
                            const std::uint64_t taken = parts.add(at, segment);
                            if (taken < count) added = in_image - offset + taken;
                          });
  TC_TRY(parts.end());
  return added;
}

Result<> OutputFile::send(FilePiece piece, std::unique_ptr<staging::Chunk>& chunk,
                          const std::function<bool()>& is_cancelled) {
  piece.file_bytes = image_.bytes();
  return folder_.store()->write(name_, piece, chunk, is_cancelled);
}

Result<> OutputFile::write_image(const staging::Chunk& chunk, std::size_t bytes,
                                 std::uint64_t offset) {
  std::span<std::byte> data = chunk.bytes().first(bytes);
  // Direct I/O writes entire blocks, so the last block is zero-padded, and finish() removes the
  // padding.
  if (file_->is_direct()) {
    data = chunk.bytes().first(align_up(bytes, os::kDirectAlignment));
    std::memset(data.data() + bytes, 0, data.size() - bytes);
    if (data.size() > bytes) is_padded_ = true;
  }
  TC_TRY(file_->write_at(data, offset));
  if (!file_->is_direct()) file_->start_writeback(offset, bytes);
  return {};
}

Result<> OutputFile::write_segment(std::span<const std::byte> data, std::uint64_t offset) {
  os::File& buffered = edges_ ? *edges_ : *file_;
  const std::uint64_t misalignment = offset % os::kDirectAlignment;
  const bool is_congruent =
      reinterpret_cast<std::uintptr_t>(data.data()) % os::kDirectAlignment == misalignment;
  const bool is_direct = edges_ && file_->is_direct() && is_congruent;
  if (!is_direct || data.size() < planning::kLongRunBytes) {
    TC_TRY(buffered.write_at(data, offset));
    // Short runs share their pages with other ranks, which may not have written yet.
    if (data.size() >= planning::kLongRunBytes) buffered.start_writeback(offset, data.size());
    return {};
  }
  const std::uint64_t head = misalignment == 0 ? 0 : os::kDirectAlignment - misalignment;
  const std::uint64_t blocks = align_down(data.size() - head, os::kDirectAlignment);
  TC_TRY(buffered.write_at(data.first(head), offset));
  TC_TRY(file_->write_at(data.subspan(head, blocks), offset + head));
  return buffered.write_at(data.subspan(head + blocks), offset + head + blocks);
}

Result<> OutputFile::finish(bool sync, Timing& timing) {
  if (is_in_store()) return {};
  if (collective_ != nullptr) {
    TC_TRY(Parts(*this).write_ready_blocks());
  }
  os::File file = std::move(*file_);
  file_.reset();
  if (edges_) {
    TC_TRY(std::move(*std::exchange(edges_, std::nullopt)).close());
  }
  if (is_padded_) {
    TC_TRY(file.truncate(bytes_));
  }
  if (sync) {
    const ScopedTimer timed(timing, Activity::fsync);
    TC_TRY(file.sync());
  }
  return std::move(file).close();
}

// Ignores errors: no metadata refers to the file, and the save has already failed with an error.
void OutputFile::remove() const noexcept try {
  // A different file with this name belongs to another save, which took over the directory after
  // this process was suspended and declared dead.
  if (identity_) {
    static_cast<void>(folder_.directory()->remove(name_, *identity_));
  } else if (is_created_) {
    static_cast<void>(folder_.directory()->remove(name_));
  }
} catch (...) {
}

}  // namespace torch_ckpt::engine
