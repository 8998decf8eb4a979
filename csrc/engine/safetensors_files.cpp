#include "engine/safetensors_files.h"

#include <algorithm>
#include <cerrno>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <utility>

#include "engine/record_reader.h"
#include "engine/safetensors_headers.h"
#include "format/crc32.h"
#include "format/safe_checksums.h"
#include "format/weight_map.h"
#include "index/safetensors_index.h"

namespace torch_ckpt::engine {
namespace {

using Checksums = std::map<std::string, format::SafeChecksums>;

Result<format::WeightMap> read_weight_map(const Folder& folder, const std::string& name) {
  const auto file = DataFile::open(folder, name, DirectIo::off);
  if (!file) return file.error();
  const auto contents = read_text(*file);
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
  HeaderReader(const Folder& folder, const Checksums& checksums)
      : folder_(folder), checksums_(checksums) {}

  Result<> add(const std::string& name) {
    const auto opened = DataFile::open(folder_, name, DirectIo::off);
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
  Result<> add_open(const std::string& name, const DataFile& opened) {
    auto header = read_safetensors_header(opened);
    if (!header) return header.error();
    SafetensorsFile& file = files_.emplace_back();
    file.name = name;
    file.bytes = header->file_bytes;
    file.header_crc = format::crc32(0, std::as_bytes(std::span(header->bytes)));
    std::string_view table;
    if (const auto known = checksums_.find(name); known != checksums_.end()) {
      const format::SafeChecksums& saved = known->second;
      file.has_stale_checksums = saved.bytes != file.bytes || saved.header_crc != file.header_crc;
      if (!file.has_stale_checksums) table = saved.table;
    }
    for (auto& [key, value] : header->contents.metadata) {
      metadata_.insert_or_assign(key, std::move(value));
    }
    return builder_.add_file(name, header->contents.tensors, table);
  }

  const Folder& folder_;
  const Checksums& checksums_;
  index::SafetensorsIndexBuilder builder_;
  std::map<std::string, std::string> metadata_;
  std::vector<SafetensorsFile> files_;
};

}  // namespace

Result<SafetensorsFiles> read_safetensors(const Folder& folder, const std::string& name) {
  auto saved = read_safe_checksums(folder);
  if (!saved) return saved.error();
  Checksums checksums;
  for (format::SafeChecksums& of_file : *saved) {
    std::string file = of_file.name;
    checksums.insert_or_assign(std::move(file), std::move(of_file));
  }
  HeaderReader reader(folder, checksums);
  if (!name.ends_with(format::kWeightMapSuffix)) {
    TC_TRY(reader.add(name));
    return std::move(reader).finish();
  }
  const auto map = read_weight_map(folder, name);
  if (!map) return map.error();
  std::set<std::string> names;
  for (const auto& [tensor, file] : *map) names.insert(file);
  for (const std::string& file : names) {
    const auto added = reader.add(file);
    if (!added && added.error().sys_errno == ENOENT) {
      return in_file(format_error(Errc::metadata_inconsistent,
                                  "the index names " + file + ", which does not exist"),
                     folder.path_of(name));
    }
    if (!added) return added.error();
  }
  SafetensorsFiles read = std::move(reader).finish();
  if (auto same = compare(*map, read.index); !same) {
    return in_file(same.error(), folder.path_of(name));
  }
  return read;
}

}  // namespace torch_ckpt::engine
