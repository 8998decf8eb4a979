#include "engine/record_reader.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "checked_math.h"

namespace torch_ckpt::engine {
namespace {

// For smaller reads, direct I/O costs more than it saves by bypassing the page cache.
constexpr std::size_t kDirectMinRead = std::size_t{64} << 10;

// If at least this fraction of a range is in the page cache, the range is read from there.
constexpr double kCachedFraction = 0.5;

// Maximum number of heads that are kept for a file.
constexpr std::size_t kMostHeads = 64;

}  // namespace

Result<DataFile> DataFile::open(const Folder& folder, const std::string& name, DirectIo direct_io) {
  DataFile file(name, folder.path_of(name));
  if (Store* const store = folder.store()) {
    auto bytes = store->size(name);
    if (!bytes) return bytes.error();
    file.store_ = store;
    file.heads_ = std::make_unique<Heads>();
    file.bytes_ = *bytes;
    return file;
  }
  const os::Directory& directory = *folder.directory();
  auto buffered = directory.open_for_read(name);
  if (!buffered) return buffered.error();
  auto bytes = buffered->size();
  if (!bytes) return bytes.error();
  if (direct_io != DirectIo::off) {
    auto opened = directory.open_for_read(name, os::IoMode::direct);
    if (!opened) return opened.error();
    if (opened->is_direct()) file.direct_ = std::move(*opened);
  }
  if (direct_io == DirectIo::on && !file.direct_) {
    Error error = format_error(Errc::invalid_argument,
                               "direct_io=True, but this file system does not support direct I/O. "
                               "Pass direct_io=\"auto\".");
    error.operation = "open";
    error.path = file.path_;
    return error;
  }
  file.buffered_ = std::move(*buffered);
  file.direct_io_ = direct_io;
  file.bytes_ = *bytes;
  return file;
}

bool DataFile::prefers_direct_read(std::uint64_t offset, std::size_t length) const {
  if (store_ != nullptr) return true;
  if (!direct_) return false;
  if (direct_io_ == DirectIo::on) return true;
  return length >= kDirectMinRead && buffered_->cached_fraction(offset, length) < kCachedFraction;
}

Result<> DataFile::read(std::span<std::byte> out, std::uint64_t offset) const {
  if (store_ == nullptr) return buffered_->read_at(out, offset);
  auto read = store_->read(name_, offset, out.size());
  if (!read) return read.error();
  if (!out.empty()) std::memcpy(out.data(), read->bytes.data(), out.size());
  return {};
}

std::uint64_t DataFile::ends_bytes() const {
  return store_ != nullptr ? kEndsBytesInStore : kEndsBytes;
}

Result<std::vector<std::byte>> DataFile::read_head(std::uint64_t offset,
                                                   std::uint64_t bytes) const {
  if (heads_ != nullptr) {
    const os::MutexLock lock(heads_->mutex);
    auto kept = heads_->by_offset.extract(offset);
    if (!kept.empty() && kept.mapped().size() >= bytes) {
      kept.mapped().resize(bytes);
      return std::move(kept.mapped());
    }
  }
  std::vector<std::byte> head(bytes);
  TC_TRY(read(head, offset));
  return head;
}

Result<std::vector<std::byte>> DataFile::read_tail(std::uint64_t offset,
                                                   std::uint64_t bytes) const {
  const std::uint64_t end = offset + bytes;
  const std::uint64_t next = heads_ == nullptr ? 0 : std::min(kEndsBytesInStore, bytes_ - end);
  std::vector<std::byte> tail(bytes + next);
  TC_TRY(read(tail, offset));
  if (next > 0) {
    const os::MutexLock lock(heads_->mutex);
    auto& by_offset = heads_->by_offset;
    by_offset[end].assign(tail.begin() + static_cast<std::ptrdiff_t>(bytes), tail.end());
    // Records are read in ascending order.
    if (by_offset.size() > kMostHeads) by_offset.erase(by_offset.begin());
    tail.resize(bytes);
  }
  return tail;
}

Result<ReadBytes> DataFile::fetch(std::span<std::byte> scratch, std::uint64_t offset,
                                  std::size_t length, bool direct) const {
  if (scratch.empty() && store_ != nullptr) return store_->read(name_, offset, length);
  const std::uint64_t begin = align_down(offset, os::kDirectAlignment);
  const std::size_t skip = offset - begin;
  const std::size_t ask = align_up(skip + length, os::kDirectAlignment);
  if (direct && direct_ && ask <= scratch.size()) {
    auto got = direct_->read_some_at(scratch.first(ask), begin);
    if (got && *got >= skip + length) return ReadBytes{scratch.subspan(skip, length)};
    // Fall back to a buffered read in two cases: some file systems open a file for direct I/O but
    // then reject the read (EINVAL); and if the file is too short, the buffered read reports the
    // error.
    if (!got && got.error().sys_errno != EINVAL) return got.error();
  }
  const std::span<std::byte> out = scratch.first(length);
  TC_TRY(read(out, offset));
  return ReadBytes{out};
}

Result<std::span<const std::byte>> RecordInMemory::at(std::uint64_t offset, std::uint64_t length) {
  if (!inside(offset, length, bytes_.size())) {
    return format_error(Errc::zip_inconsistent, "the archive refers to bytes outside its record");
  }
  return bytes_.subspan(offset, length);
}

Result<std::span<const std::byte>> RecordInFile::at(std::uint64_t offset, std::uint64_t length) {
  if (!inside(offset, length, bytes_)) {
    return format_error(Errc::zip_inconsistent, "the archive refers to bytes outside its record");
  }
  const std::uint64_t ends = std::min(file_.ends_bytes(), bytes_);
  if (inside(offset, length, ends)) {
    if (head_.empty()) {
      auto head = file_.read_head(offset_, ends);
      if (!head) return head.error();
      head_ = std::move(*head);
    }
    return std::span<const std::byte>(head_).subspan(offset, length);
  }
  if (offset >= bytes_ - ends) {
    if (tail_.empty()) {
      auto tail = file_.read_tail(offset_ + bytes_ - ends, ends);
      if (!tail) return tail.error();
      tail_ = std::move(*tail);
    }
    return std::span<const std::byte>(tail_).subspan(offset - (bytes_ - ends), length);
  }
  // This read is at most 1 MiB, because format/record_index.cpp reads no more at a time.
  other_.resize(length);
  TC_TRY(file_.read(other_, offset_ + offset));
  return std::span<const std::byte>(other_);
}

}  // namespace torch_ckpt::engine
