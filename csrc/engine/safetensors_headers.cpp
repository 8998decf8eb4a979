#include "engine/safetensors_headers.h"

#include <cerrno>
#include <span>
#include <string_view>
#include <utility>

#include "format/crc32.h"

namespace torch_ckpt::engine {
namespace {

// Limits the memory that a damaged index or file of checksums can use.
constexpr std::uint64_t kMaxTextBytes = std::uint64_t{1} << 30;

std::span<std::byte> writable_bytes(std::string& text) {
  return std::as_writable_bytes(std::span(text));
}

Error in_file(Error error, const os::File& file) {
  if (error.path.empty()) error.path = file.path();
  return error;
}

Result<ModelFile> read_model_file(const os::Directory& directory,
                                  const format::SafeChecksums& checksums) {
  const auto opened = directory.open_for_read(checksums.name);
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
                   *opened);
  }
  return file;
}

}  // namespace

Result<std::string> read_text(const os::File& file) {
  const auto bytes = file.size();
  if (!bytes) return bytes.error();
  if (*bytes > kMaxTextBytes) {
    return in_file(format_error(Errc::metadata_inconsistent,
                                "the file has " + std::to_string(*bytes) +
                                    " bytes; the maximum is " + std::to_string(kMaxTextBytes)),
                   file);
  }
  std::string contents(*bytes, '\0');
  if (auto read = file.read_at(writable_bytes(contents), 0); !read) return read.error();
  return contents;
}

Result<std::vector<format::SafeChecksums>> read_safe_checksums(const os::Directory& directory) {
  const auto file = directory.open_for_read(std::string(format::kSafeChecksumsName));
  if (!file && file.error().sys_errno == ENOENT) return std::vector<format::SafeChecksums>();
  if (!file) return file.error();
  const auto contents = read_text(*file);
  if (!contents) return contents.error();
  auto decoded = format::decode_safe_checksums(std::as_bytes(std::span(*contents)));
  if (!decoded) return in_file(decoded.error(), *file);
  return decoded;
}

Result<StoredHeader> read_safetensors_header(const os::File& file) {
  const auto bytes = file.size();
  if (!bytes) return bytes.error();
  StoredHeader header{*bytes, std::string(format::kSafeLengthBytes, '\0'), {}};
  const auto read = file.read_some_at(writable_bytes(header.bytes), 0);
  if (!read) return read.error();
  const auto length =
      format::safetensors_header_bytes(writable_bytes(header.bytes).first(*read), *bytes);
  if (!length) return in_file(length.error(), file);
  header.bytes.resize(format::kSafeLengthBytes + *length);
  auto json = writable_bytes(header.bytes).subspan(format::kSafeLengthBytes);
  if (auto rest = file.read_at(json, format::kSafeLengthBytes); !rest) return rest.error();
  auto contents = format::decode_safetensors_header(
      std::string_view(header.bytes).substr(format::kSafeLengthBytes), *bytes);
  if (!contents) return in_file(contents.error(), file);
  header.contents = std::move(*contents);
  return header;
}

Result<std::vector<ModelFile>> read_model_files(const os::Directory& directory) {
  const auto checksums = read_safe_checksums(directory);
  if (!checksums) return checksums.error();
  if (checksums->empty()) {
    Error error = format_error(Errc::invalid_argument,
                               "the directory has no checksums; save it with torch_ckpt first");
    error.path = directory.path();
    return error;
  }
  std::vector<ModelFile> files;
  for (const format::SafeChecksums& of_file : *checksums) {
    auto file = read_model_file(directory, of_file);
    if (!file) return file.error();
    files.push_back(std::move(*file));
  }
  return files;
}

}  // namespace torch_ckpt::engine
