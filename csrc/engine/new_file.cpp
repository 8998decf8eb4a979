#include "engine/new_file.h"

namespace torch_ckpt::engine {
namespace {

// For smaller files, which have few blocks, the page cache is as fast as direct I/O.
constexpr std::uint64_t kDirectMinBytes = std::uint64_t{1} << 20;

}  // namespace

Result<os::File> create_file(const os::Directory& directory, const std::string& name,
                             std::uint64_t bytes, DirectIo direct_io, bool may_exist) {
  const bool direct =
      direct_io == DirectIo::on || (direct_io == DirectIo::automatic && bytes >= kDirectMinBytes);
  const os::IoMode mode = direct ? os::IoMode::direct : os::IoMode::buffered;
  auto file = may_exist ? directory.open_or_create(name, mode) : directory.create(name, mode);
  if (!file || direct_io != DirectIo::on || file->is_direct()) return file;
  Error error = format_error(Errc::invalid_argument,
                             "direct_io=True, but this file system does not support direct I/O. "
                             "Pass direct_io=\"auto\".");
  error.operation = "open";
  error.path = file->path();
  // Ignores errors: the save has failed already.
  if (!may_exist) static_cast<void>(directory.remove(name));
  return error;
}

Result<NewFile> NewFile::create(const os::Directory& directory, const std::string& name,
                                std::uint64_t bytes, DirectIo direct_io) {
  auto file = create_file(directory, name, bytes, direct_io, false);
  if (!file) return file.error();
  TC_TRY(file->reserve(bytes));
  return NewFile(std::move(*file));
}

Result<> NewFile::write(std::span<const std::byte> data) {
  TC_TRY(file_.write_at(data, offset_));
  if (!file_.is_direct()) file_.start_writeback(offset_, data.size());
  offset_ += data.size();
  return {};
}

Result<> NewFile::finish(bool sync) && {
  if (sync) {
    TC_TRY(file_.sync());
  }
  return std::move(file_).close();
}

}  // namespace torch_ckpt::engine
