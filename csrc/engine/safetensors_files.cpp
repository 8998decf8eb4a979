#include "engine/safetensors_files.h"

#include <algorithm>
#include <cerrno>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <utility>

#include "format/crc32.h"
#include "format/safe_checksums.h"
#include "format/weight_map.h"
#include "index/safetensors_index.h"
#include "os/file.h"

namespace torch_ckpt::engine {
namespace {

// Limits the memory that a damaged index or file of checksums can use.
constexpr std::uint64_t kMaxTextBytes = std::uint64_t{1} << 30;

std::span<std::byte> writable_bytes(std::string& text) {
  return std::as_writable_bytes(std::span(text));
}

Error in_file(Error error, const std::string& path) {
  if (error.path.empty()) error.path = path;
  return error;
}

/// Reads an entire file.
Result<std::string> contents_of(const os::File& file) {
  const auto bytes = file.size();
  if (!bytes) return bytes.error();
  if (*bytes > kMaxTextBytes) {
    return in_file(format_error(Errc::metadata_inconsistent,
                                "the file has " + std::to_string(*bytes) +
                                    " bytes; the maximum is " + std::to_string(kMaxTextBytes)),
                   file.path());
  }
  std::string contents(*bytes, '\0');
  if (auto read = file.read_at(writable_bytes(contents), 0); !read) return read.error();
  return contents;
}

using Checksums = std::map<std::string, format::SafeChecksums>;

/// Reads the directory's checksums, by file. Returns none if the directory has none.
Result<Checksums> read_checksums(const os::Directory& directory) {
  const std::string name(format::kSafeChecksumsName);
  const auto file = directory.open_for_read(name);
  if (!file && file.error().sys_errno == ENOENT) return Checksums();
  if (!file) return file.error();
  const auto contents = contents_of(*file);
  if (!contents) return contents.error();
  auto decoded = format::decode_safe_checksums(std::as_bytes(std::span(*contents)));
  if (!decoded) return in_file(decoded.error(), file->path());
  Checksums checksums;
  for (format::SafeChecksums& of_file : *decoded) {
    std::string key = of_file.name;
    checksums.insert_or_assign(std::move(key), std::move(of_file));
  }
  return checksums;
}

Result<format::WeightMap> read_weight_map(const os::Directory& directory, const std::string& name) {
  const auto file = directory.open_for_read(name);
  if (!file) return file.error();
  const auto contents = contents_of(*file);
  if (!contents) return contents.error();
  auto decoded = format::decode_weight_map(*contents);
  if (!decoded) return in_file(decoded.error(), file->path());
  return decoded;
}

/// Checks that the index and the files contain the same tensors, each in the same file.
Result<> compare(const format::WeightMap& map, const index::CheckpointIndex& index) {
  std::vector<bool> is_mapped(index.entries().size());
  const auto refuse = [](const std::string& tensor, const std::string& expected,
                         const std::string& found) {
    return format_error(
        Errc::metadata_inconsistent,
        "the index assigns " + tensor + " to " + expected + ", but " + found + " contains it");
  };
  const auto file_of = [&](std::uint32_t entry) {
    const auto shard = index.shards(index.entries()[entry]).front();
    return std::string(index.text(index.files()[shard.file]));
  };
  for (const auto& [tensor, file] : map) {
    const auto found = index.find(tensor);
    if (!found) return refuse(tensor, file, "no file");
    if (is_mapped[*found]) {
      return format_error(Errc::metadata_inconsistent, "the index contains " + tensor + " twice");
    }
    if (file_of(*found) != file) return refuse(tensor, file, file_of(*found));
    is_mapped[*found] = true;
  }
  const auto missing = std::ranges::find(is_mapped, false);
  if (missing == is_mapped.end()) return {};
  const auto entry = static_cast<std::uint32_t>(missing - is_mapped.begin());
  return refuse(std::string(index.name(entry)), "no file", file_of(entry));
}

// Reads files one by one, and collects their contents.
class HeaderReader {
 public:
  HeaderReader(const os::Directory& directory, const Checksums& checksums)
      : directory_(directory), checksums_(checksums) {}

  Result<> add(const std::string& name) {
    const auto opened = directory_.open_for_read(name);
    if (!opened) return opened.error();
    if (auto added = add_open(name, *opened); !added) return in_file(added.error(), opened->path());
    return {};
  }

  SafetensorsFiles finish() && {
    SafetensorsFiles read{std::move(builder_).finish(), {}, std::move(files_)};
    for (auto& [key, value] : metadata_) read.metadata.emplace_back(key, std::move(value));
    return read;
  }

 private:
  Result<> add_open(const std::string& name, const os::File& opened) {
    const auto bytes = opened.size();
    if (!bytes) return bytes.error();
    std::string begin(format::kSafeLengthBytes, '\0');
    const auto read = opened.read_some_at(writable_bytes(begin), 0);
    if (!read) return read.error();
    const auto length =
        format::safetensors_header_bytes(writable_bytes(begin).first(*read), *bytes);
    if (!length) return length.error();
    std::string json(*length, '\0');
    auto rest = opened.read_at(writable_bytes(json), format::kSafeLengthBytes);
    if (!rest) return rest;
    auto header = format::decode_safetensors_header(json, *bytes);
    if (!header) return header.error();

    SafetensorsFile& file = files_.emplace_back();
    file.name = name;
    file.bytes = *bytes;
    file.header_crc = format::crc32(format::crc32(0, writable_bytes(begin)), writable_bytes(json));
    std::string_view table;
    if (const auto known = checksums_.find(name); known != checksums_.end()) {
      const format::SafeChecksums& saved = known->second;
      file.has_stale_checksums = saved.bytes != file.bytes || saved.header_crc != file.header_crc;
      if (!file.has_stale_checksums) table = saved.table;
    }
    for (auto& [key, value] : header->metadata) metadata_.insert_or_assign(key, std::move(value));
    return builder_.add_file(name, header->tensors, table);
  }

  const os::Directory& directory_;
  const Checksums& checksums_;
  index::SafetensorsIndexBuilder builder_;
  std::map<std::string, std::string> metadata_;
  std::vector<SafetensorsFile> files_;
};

}  // namespace

Result<SafetensorsFiles> read_safetensors(const os::Directory& directory, const std::string& name) {
  const auto checksums = read_checksums(directory);
  if (!checksums) return checksums.error();
  HeaderReader reader(directory, *checksums);
  if (!name.ends_with(format::kWeightMapSuffix)) {
    if (auto added = reader.add(name); !added) return added.error();
    return std::move(reader).finish();
  }
  const auto map = read_weight_map(directory, name);
  if (!map) return map.error();
  std::set<std::string> names;
  for (const auto& [tensor, file] : *map) names.insert(file);
  for (const std::string& file : names) {
    const auto added = reader.add(file);
    if (!added && added.error().sys_errno == ENOENT) {
      return in_file(format_error(Errc::metadata_inconsistent,
                                  "the index names " + file + ", which does not exist"),
                     directory.path_of(name));
    }
    if (!added) return added.error();
  }
  SafetensorsFiles read = std::move(reader).finish();
  if (auto same = compare(*map, read.index); !same) {
    return in_file(same.error(), directory.path_of(name));
  }
  return read;
}

}  // namespace torch_ckpt::engine
