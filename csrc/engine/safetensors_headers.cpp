#include "engine/safetensors_headers.h"

#include <algorithm>
#include <cerrno>
#include <span>
#include <string_view>
#include <utility>

#include "format/crc32.h"

namespace torch_ckpt::engine {
namespace {

// Limits the memory that a damaged index or file of checksums can use.
constexpr std::uint64_t kMaxTextBytes = std::uint64_t{1} << 30;
// Read at once at the beginning of a file. Most headers are shorter, so that a store needs only one
// request.
constexpr std::uint64_t kFirstBytes = std::uint64_t{64} << 10;

std::span<std::byte> writable_bytes(std::string& text) {
  return std::as_writable_bytes(std::span(text));
}

Result<ModelFile> read_model_file(const Folder& folder, const format::SafeChecksums& checksums) {
  const auto opened = DataFile::open(folder, checksums.name, DirectIo::off);
  if (!opened) return opened.error();
  ModelFile file{checksums, {}, {}};
  std::uint64_t bytes = 0;
  if (checksums.table.empty()) {
    auto text = read_text(*opened);
    if (!text) return text.error();
    file.start = std::move(*text);
    bytes = file.start.size();
  } else {
    auto header = read_safetensors_header(*opened);
    if (!header) return header.error();
    file.start = std::move(header->bytes);
    file.tensors = std::move(header->contents.tensors);
    bytes = header->file_bytes;
  }
  const std::uint32_t crc = format::crc32(0, std::as_bytes(std::span(file.start)));
  if (bytes != checksums.bytes || crc != checksums.header_crc) {
    return in_file(format_error(Errc::checksum_mismatch,
                                "the file has changed since its checksums were saved"),
                   opened->path());
  }
  return file;
}

}  // namespace

Error in_file(Error error, const std::string& path) {
  if (error.path.empty()) error.path = path;
  return error;
}

Result<std::string> read_text(const DataFile& file) {
  if (file.bytes() > kMaxTextBytes) {
    return in_file(format_error(Errc::metadata_inconsistent,
                                "the file has " + std::to_string(file.bytes()) +
                                    " bytes; the maximum is " + std::to_string(kMaxTextBytes)),
                   file.path());
  }
  std::string contents(file.bytes(), '\0');
  TC_TRY(file.read(writable_bytes(contents), 0));
  return contents;
}

Result<std::vector<format::SafeChecksums>> read_safe_checksums(const Folder& folder) {
  const auto file = DataFile::open(folder, std::string(format::kSafeChecksumsName), DirectIo::off);
  if (!file && file.error().sys_errno == ENOENT) return std::vector<format::SafeChecksums>();
  if (!file) return file.error();
  const auto contents = read_text(*file);
  if (!contents) return contents.error();
  auto decoded = format::decode_safe_checksums(std::as_bytes(std::span(*contents)));
  if (!decoded) return in_file(decoded.error(), file->path());
  return decoded;
}

Result<StoredHeader> read_safetensors_header(const DataFile& file) {
  StoredHeader header{file.bytes(), std::string(std::min(file.bytes(), kFirstBytes), '\0'), {}};
  const std::size_t first = header.bytes.size();
  TC_TRY(file.read(writable_bytes(header.bytes), 0));
  const auto length = format::safetensors_header_bytes(
      writable_bytes(header.bytes).first(std::min(first, format::kSafeLengthBytes)), file.bytes());
  if (!length) return in_file(length.error(), file.path());
  header.bytes.resize(format::kSafeLengthBytes + *length);
  if (header.bytes.size() > first) {
    auto rest = file.read(writable_bytes(header.bytes).subspan(first), first);
    if (!rest) return rest.error();
  }
  auto contents = format::decode_safetensors_header(
      std::string_view(header.bytes).substr(format::kSafeLengthBytes), file.bytes());
  if (!contents) return in_file(contents.error(), file.path());
  header.contents = std::move(*contents);
  return header;
}

Result<std::vector<ModelFile>> read_model_files(const Folder& folder) {
  const auto checksums = read_safe_checksums(folder);
  if (!checksums) return checksums.error();
  if (checksums->empty()) {
    Error error = format_error(Errc::invalid_argument,
                               "the directory has no checksums; save it with torch_ckpt first");
    error.path = folder.path();
    return error;
  }
  std::vector<ModelFile> files;
  for (const format::SafeChecksums& of_file : *checksums) {
    auto file = read_model_file(folder, of_file);
    if (!file) return file.error();
    files.push_back(std::move(*file));
  }
  return files;
}

}  // namespace torch_ckpt::engine
