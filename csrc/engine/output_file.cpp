#include "engine/output_file.h"

#include <cstring>

#include "checked_math.h"

namespace torch_ckpt::engine {
namespace {

// For smaller files, which have few blocks, the page cache is as fast as direct I/O.
constexpr std::uint64_t kDirectMinBytes = std::uint64_t{1} << 20;

}  // namespace

Result<> OutputFile::open(DirectIo direct_io) {
  const bool direct =
      direct_io == DirectIo::on || (direct_io == DirectIo::automatic && bytes_ >= kDirectMinBytes);
  auto file = directory_.create(name_, direct ? os::IoMode::direct : os::IoMode::buffered);
  if (!file) return file.error();
  is_created_ = true;
  auto identity = file->identity();
  if (!identity) return identity.error();
  identity_ = *identity;
  if (direct_io == DirectIo::on && !file->is_direct()) {
    Error error = format_error(Errc::invalid_argument,
                               "direct_io=True, but this file system does not support direct I/O. "
                               "Pass direct_io=\"auto\".");
    error.operation = "open";
    error.path = file->path();
    return error;
  }
  if (auto reserved = file->reserve(bytes_); !reserved) return reserved;
  file_ = std::move(*file);
  return {};
}

Result<> OutputFile::write(const staging::Chunk& chunk, std::size_t bytes, std::uint64_t offset) {
  std::span<std::byte> data = chunk.bytes().first(bytes);
  if (file_->is_direct()) {
    data = chunk.bytes().first(align_up(bytes, os::kDirectAlignment));
    std::memset(data.data() + bytes, 0, data.size() - bytes);
  }
  if (auto written = file_->write_at(data, offset); !written) return written;
  if (!file_->is_direct()) file_->start_writeback(offset, bytes);
  return {};
}

Result<> OutputFile::finish(bool sync, Timing& timing, std::size_t number) {
  os::File file = std::move(*file_);
  file_.reset();
  if (file.is_direct()) {
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
