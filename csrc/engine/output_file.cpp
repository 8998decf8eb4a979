#include "engine/output_file.h"

#include <cstdint>
#include <cstring>
#include <utility>

#include "checked_math.h"

namespace torch_ckpt::engine {
namespace {

// For smaller files, which have few blocks, the page cache is as fast as direct I/O.
constexpr std::uint64_t kDirectMinBytes = std::uint64_t{1} << 20;

}  // namespace

Result<> OutputFile::open(DirectIo direct_io) {
  const bool direct =
      direct_io == DirectIo::on || (direct_io == DirectIo::automatic && bytes_ >= kDirectMinBytes);
  const os::IoMode mode = direct ? os::IoMode::direct : os::IoMode::buffered;
  auto file = image_.is_of_parts() ? directory_.open_or_create(name_, mode)
                                   : directory_.create(name_, mode);
  if (!file) return file.error();
  if (!image_.is_of_parts()) {
    is_created_ = true;
    auto identity = file->identity();
    if (!identity) return identity.error();
    identity_ = *identity;
  }
  if (direct_io == DirectIo::on && !file->is_direct()) {
    Error error = format_error(Errc::invalid_argument,
                               "direct_io=True, but this file system does not support direct I/O. "
                               "Pass direct_io=\"auto\".");
    error.operation = "open";
    error.path = file->path();
    return error;
  }
  if (image_.is_of_parts() && file->is_direct()) {
    auto edges = directory_.open_or_create(name_, os::IoMode::buffered);
    if (!edges) return edges.error();
    edges_ = std::move(*edges);
  }
  if (auto reserved = file->reserve(bytes_); !reserved) return reserved;
  if (image_.is_of_parts()) {
    // Where space cannot be reserved. A file that ends before a part that is written through the
    // page cache could lose the bytes of another rank in the same page.
    if (auto extended = file->truncate(bytes_); !extended) return extended;
  }
  file_ = std::move(*file);
  return {};
}

Result<> OutputFile::write(const staging::Chunk& chunk, std::size_t bytes, std::uint64_t offset) {
  if (image_.is_of_parts()) return write_parts(chunk.bytes().first(bytes), offset);
  std::span<std::byte> data = chunk.bytes().first(bytes);
  // Direct I/O writes entire blocks, so the last block is zero-padded, and finish() removes the
  // padding.
  if (file_->is_direct()) {
    data = chunk.bytes().first(align_up(bytes, os::kDirectAlignment));
    std::memset(data.data() + bytes, 0, data.size() - bytes);
  }
  if (auto written = file_->write_at(data, offset); !written) return written;
  if (!file_->is_direct()) file_->start_writeback(offset, bytes);
  return {};
}

Result<> OutputFile::write_parts(std::span<const std::byte> data, std::uint64_t offset) {
  // Join segments that are adjacent both in the file and in memory.
  std::uint64_t begin = 0;
  std::span<const std::byte> joined;
  Result<> written;
  image_.for_each_segment(
      offset, offset + data.size(),
      [&](std::uint64_t at, std::uint64_t in_image, std::uint64_t bytes) {
        if (!written) return;
        const auto segment = data.subspan(in_image - offset, bytes);
        if (at == begin + joined.size() && segment.data() == joined.data() + joined.size()) {
          joined = std::span(joined.data(), joined.size() + bytes);
          return;
        }
        written = write_segment(joined, begin);
        begin = at;
        joined = segment;
      });
  return written ? write_segment(joined, begin) : written;
}

Result<> OutputFile::write_segment(std::span<const std::byte> data, std::uint64_t offset) {
  os::File& buffered = edges_ ? *edges_ : *file_;
  const std::uint64_t misalignment = offset % os::kDirectAlignment;
  const bool is_congruent =
      reinterpret_cast<std::uintptr_t>(data.data()) % os::kDirectAlignment == misalignment;
  if (!edges_ || !is_congruent || data.size() < FileImage::kLongRunBytes) {
    if (auto written = buffered.write_at(data, offset); !written) return written;
    // Short runs share their pages with other ranks, which may not have written yet.
    if (data.size() >= FileImage::kLongRunBytes) buffered.start_writeback(offset, data.size());
    return {};
  }
  const std::uint64_t head = misalignment == 0 ? 0 : os::kDirectAlignment - misalignment;
  const std::uint64_t blocks = align_down(data.size() - head, os::kDirectAlignment);
  if (auto written = buffered.write_at(data.first(head), offset); !written) return written;
  if (auto written = file_->write_at(data.subspan(head, blocks), offset + head); !written) {
    return written;
  }
  return buffered.write_at(data.subspan(head + blocks), offset + head + blocks);
}

Result<> OutputFile::finish(bool sync, Timing& timing, std::size_t number) {
  os::File file = std::move(*file_);
  file_.reset();
  if (edges_) {
    if (auto closed = std::move(*std::exchange(edges_, std::nullopt)).close(); !closed) {
      return closed;
    }
  }
  if (file.is_direct() && !image_.is_of_parts()) {
    if (auto cut = file.truncate(bytes_); !cut) return cut;
  }
  if (sync) {
    const ScopedTimer timed(timing, Activity::fsync, number);
    if (auto synced = file.sync(); !synced) return synced;
  }
  return std::move(file).close();
}

// Ignores errors: no metadata refers to the file, and the save has already failed with an error.
void OutputFile::remove() const noexcept try {
  // A different file with this name belongs to another save, which took over the directory after
  // this process was suspended and declared dead.
  if (identity_) {
    static_cast<void>(directory_.remove(name_, *identity_));
  } else if (is_created_) {
    static_cast<void>(directory_.remove(name_));
  }
} catch (...) {
}

}  // namespace torch_ckpt::engine
