#include "format/record_index.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checked_math.h"
#include "format/crc32.h"
#include "format/little_endian.h"
#include "format/zip.h"

namespace torch_ckpt::format {
namespace {

// A record written by torch has seven entries and a directory of about 500 bytes.
struct Limits {
  std::uint64_t entries = 32;
  std::uint64_t directory_bytes = std::uint64_t{16} * 1024;
};
constexpr std::uint64_t kMaxPickleBytes = 16 * 1024;

constexpr std::uint64_t kReadBytes = std::uint64_t{1} << 20;

struct ZipEntry {
  std::string name;  // without the archive's prefix
  std::uint64_t header_offset = 0;
  std::uint64_t bytes = 0;
  std::uint32_t crc = 0;
};

struct CentralDirectory {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t entries = 0;
};

// Reads the end record, which must have no comment, and the zip64 end record, if any. torch always
// writes both; other writers may omit the zip64 end record.
Result<CentralDirectory> find_directory(RecordBytes& record, const Limits& limits) {
  const std::uint64_t size = record.size();
  if (size < zip::kEndBytes) {
    return format_error(Errc::not_a_zip, "the record is too short for a zip archive");
  }
  auto end = record.at(size - zip::kEndBytes, zip::kEndBytes);
  if (!end) return end.error();
  ByteReader cursor(*end);
  if (cursor.number(4) != zip::kEnd) {
    return format_error(Errc::not_a_zip,
                        "the record does not end with a zip end-of-central-directory record",
                        size - zip::kEndBytes);
  }
  cursor.take(4 + 2);
  CentralDirectory directory;
  directory.entries = cursor.number(2);
  directory.bytes = cursor.number(4);
  directory.offset = cursor.number(4);

  constexpr std::uint64_t kLocatorBack = zip::kEndBytes + zip::kEnd64LocatorBytes;
  if (size >= kLocatorBack + zip::kEnd64Bytes) {
    auto locator = record.at(size - kLocatorBack, zip::kEnd64LocatorBytes);
    if (!locator) return locator.error();
    ByteReader locator_cursor(*locator);
    if (locator_cursor.number(4) == zip::kEnd64Locator) {
      locator_cursor.take(4);
      const std::uint64_t end64_at = locator_cursor.number(8);
      if (!inside(end64_at, zip::kEnd64Bytes, size)) {
        return format_error(Errc::zip_inconsistent, "the zip64 end record lies outside the record");
      }
      auto end64 = record.at(end64_at, zip::kEnd64Bytes);
      if (!end64) return end64.error();
      ByteReader cursor64(*end64);
      if (cursor64.number(4) != zip::kEnd64) {
        return format_error(Errc::zip_inconsistent,
                            "the zip64 end locator does not point to a zip64 end record", end64_at);
      }
      cursor64.take(8 + 2 + 2 + 4 + 4 + 8);
      directory.entries = cursor64.number(8);
      directory.bytes = cursor64.number(8);
      directory.offset = cursor64.number(8);
    }
  }
  if (directory.entries > limits.entries || directory.bytes > limits.directory_bytes) {
    return format_error(Errc::pickle_unknown,
                        "the archive has too many zip entries for one tensor");
  }
  if (!inside(directory.offset, directory.bytes, size)) {
    return format_error(Errc::zip_inconsistent, "the central directory lies outside the record");
  }
  return directory;
}

Result<ZipEntry> read_entry(ByteReader& cursor, std::uint64_t record_bytes) {
  ZipEntry entry;
  if (cursor.number(4) != zip::kDirectoryEntry) {
    return format_error(Errc::zip_inconsistent, "a central directory entry has no signature");
  }
  cursor.take(2 + 2 + 2);
  const std::uint64_t method = cursor.number(2);
  cursor.take(2 + 2);
  entry.crc = static_cast<std::uint32_t>(cursor.number(4));
  std::uint64_t stored = cursor.number(4);
  entry.bytes = cursor.number(4);
  const std::uint64_t name_bytes = cursor.number(2);
  const std::uint64_t extra_bytes = cursor.number(2);
  const std::uint64_t comment_bytes = cursor.number(2);
  cursor.take(2 + 2 + 4);
  entry.header_offset = cursor.number(4);
  entry.name = cursor.text(name_bytes);
  ByteReader extra(cursor.take(extra_bytes));
  cursor.take(comment_bytes);
  while (extra.left() >= 4) {
    const std::uint64_t id = extra.number(2);
    ByteReader field(extra.take(extra.number(2)));
    if (id != zip::kExtraZip64) continue;
    if (entry.bytes == zip::kMax32) entry.bytes = field.number(8);
    if (stored == zip::kMax32) stored = field.number(8);
    if (entry.header_offset == zip::kMax32) entry.header_offset = field.number(8);
    if (field.has_failed()) {
      return format_error(Errc::zip_inconsistent, "a zip64 field is truncated");
    }
  }
  if (cursor.has_failed() || extra.has_failed()) {
    return format_error(Errc::zip_inconsistent, "a central directory entry is truncated");
  }
  if (method != 0 || stored != entry.bytes) {
    return format_error(
        Errc::zip_compressed,
        "entry '" + entry.name + "' is compressed; torch.save does not compress entries");
  }
  if (!inside(entry.header_offset, zip::kLocalHeaderBytes, record_bytes)) {
    return format_error(Errc::zip_inconsistent,
                        "entry '" + entry.name + "' begins outside the record");
  }
  return entry;
}

// Reads the entries of a central directory one after another. The directory may be as large as the
// record, so at most kReadBytes of it are in memory.
class DirectoryReader {
 public:
  static Result<DirectoryReader> open(RecordBytes& record, const Limits& limits) {
    auto directory = find_directory(record, limits);
    if (!directory) return directory.error();
    return DirectoryReader(record, *directory);
  }

  /// Returns nullopt after the last entry.
  Result<std::optional<ZipEntry>> next() {
    if (entries_left_ == 0) return std::optional<ZipEntry>();
    --entries_left_;
    if (window_.size() - position_ < kMaxDirectoryEntryBytes && bytes_left_ > 0) {
      TC_TRY(fill());
    }
    ByteReader cursor(std::span<const std::byte>(window_).subspan(position_));
    const std::size_t before = cursor.left();
    auto entry = read_entry(cursor, record_.size());
    if (!entry) return entry.error();
    position_ += before - cursor.left();
    const auto slash = entry->name.find('/');
    if (slash == std::string::npos) {
      return format_error(Errc::zip_inconsistent, "entry '" + entry->name + "' is not in a folder");
    }
    if (prefix_.empty()) prefix_ = entry->name.substr(0, slash + 1);
    if (!entry->name.starts_with(prefix_)) {
      return format_error(Errc::zip_inconsistent,
                          "the archive's entries are in more than one folder");
    }
    entry->name.erase(0, prefix_.size());
    return std::optional(std::move(*entry));
  }

 private:
  static constexpr std::size_t kMaxDirectoryEntryBytes = zip::kDirectoryEntryBytes + 3 * 0xffff;
  static_assert(kMaxDirectoryEntryBytes < kReadBytes);

  DirectoryReader(RecordBytes& record, const CentralDirectory& directory)
      : record_(record),
        entries_left_(directory.entries),
        offset_(directory.offset),
        bytes_left_(directory.bytes) {}

  /// Moves the window to the next entry. Copies the bytes, because the record is read in between.
  Result<> fill() {
    window_.erase(window_.begin(), window_.begin() + static_cast<std::ptrdiff_t>(position_));
    position_ = 0;
    const std::uint64_t more = std::min<std::uint64_t>(kReadBytes - window_.size(), bytes_left_);
    auto bytes = record_.at(offset_, more);
    if (!bytes) return bytes.error();
    window_.insert(window_.end(), bytes->begin(), bytes->end());
    offset_ += more;
    bytes_left_ -= more;
    return {};
  }

  RecordBytes& record_;
  std::uint64_t entries_left_;
  std::uint64_t offset_;  // of the first byte after the window
  std::uint64_t bytes_left_;
  std::vector<std::byte> window_;
  std::size_t position_ = 0;  // in the window
  std::string prefix_;
};

Result<std::vector<ZipEntry>> read_directory(RecordBytes& record, const Limits& limits) {
  auto directory = DirectoryReader::open(record, limits);
  if (!directory) return directory.error();
  std::vector<ZipEntry> entries;
  for (;;) {
    auto entry = directory->next();
    if (!entry) return entry.error();
    if (!*entry) return entries;
    entries.push_back(std::move(**entry));
  }
}

Result<std::uint64_t> data_offset(RecordBytes& record, const ZipEntry& entry) {
  auto header = record.at(entry.header_offset, zip::kLocalHeaderBytes);
  if (!header) return header.error();
  ByteReader cursor(*header);
  if (cursor.number(4) != zip::kLocalHeader) {
    return format_error(Errc::zip_inconsistent, "entry '" + entry.name + "' has no local header",
                        entry.header_offset);
  }
  cursor.take(22);
  const std::uint64_t name_and_extra = cursor.number(2) + cursor.number(2);
  // read_entry() has checked that the header lies in the record, so neither sum can overflow.
  const std::uint64_t offset = entry.header_offset + zip::kLocalHeaderBytes + name_and_extra;
  if (!inside(offset, entry.bytes, record.size())) {
    return format_error(Errc::zip_inconsistent,
                        "entry '" + entry.name + "' ends outside the record");
  }
  return offset;
}

Error damaged_entry(const ZipEntry& entry, std::uint64_t offset) {
  return format_error(Errc::checksum_mismatch,
                      "entry '" + entry.name +
                          "' is damaged: its CRC-32 does not match the one recorded in the archive",
                      offset);
}

// Does not check an entry whose checksum is zero: the writer did not compute one
// (torch.serialization.set_crc32_options(False)).
Result<> check_entry(std::span<const std::byte> data, const ZipEntry& entry, std::uint64_t offset) {
  if (entry.crc == 0) return {};
  const std::uint32_t found = crc32(0, data);
  if (found == entry.crc) return {};
  return damaged_entry(entry, offset);
}

/// Calls `visit` for each entry of an archive, with the offset of its data or the error of
/// data_offset(). Ends at the first error of `visit`.
template <class Visit>
Result<> visit_entries(RecordBytes& record, const Visit& visit) {
  // The directory lies in the record, so the record's size also limits the number of entries.
  auto directory = DirectoryReader::open(record, Limits{record.size(), record.size()});
  if (!directory) return directory.error();
  // Stop if entries overlap: a short archive could otherwise take very long to check.
  std::uint64_t left = record.size();
  for (;;) {
    auto next = directory->next();
    if (!next) return next.error();
    if (!*next) return {};
    const ZipEntry& entry = **next;
    const Result<std::uint64_t> at = data_offset(record, entry);
    if (at) {
      if (entry.bytes > left) {
        return format_error(Errc::zip_inconsistent, "the archive's entries overlap", *at);
      }
      left -= entry.bytes;
    }
    TC_TRY(visit(entry, at));
  }
}

const ZipEntry* find(const std::vector<ZipEntry>& entries, std::string_view name) {
  const auto found = std::find_if(entries.begin(), entries.end(),
                                  [&](const ZipEntry& e) { return e.name == name; });
  return found == entries.end() ? nullptr : &*found;
}

// Finds an entry with the same name as an earlier entry. Some zip readers use the first of them and
// others the last, so they would read different tensors.
const ZipEntry* find_duplicate(const std::vector<ZipEntry>& entries) {
  for (auto entry = entries.begin(); entry != entries.end(); ++entry) {
    const auto same = [&](const ZipEntry& other) { return other.name == entry->name; };
    if (std::any_of(entries.begin(), entry, same)) return &*entry;
  }
  return nullptr;
}

// Returns true if the storage contains all elements that the sizes and strides address.
bool is_inside_storage(const TensorHeader& header) {
  std::uint64_t last = header.storage_offset;
  for (std::size_t i = 0; i < header.sizes.size(); ++i) {
    if (header.sizes[i] == 0) return true;
    const auto step = checked_mul(header.sizes[i] - 1, header.strides[i]);
    const auto sum = step ? checked_add(last, *step) : std::nullopt;
    if (!sum) return false;
    last = *sum;
  }
  return last < header.storage_bytes / header.dtype->item_bytes;
}

}  // namespace

Result<RecordIndex> index_record(RecordBytes& record) {
  auto entries = read_directory(record, Limits{});
  if (!entries) return entries.error();
  if (const ZipEntry* duplicate = find_duplicate(*entries); duplicate != nullptr) {
    return format_error(Errc::zip_inconsistent,
                        "the archive has two entries named '" + duplicate->name + "'");
  }

  const ZipEntry* pickle = find(*entries, "data.pkl");
  const ZipEntry* payload = find(*entries, "data/0");
  if (pickle == nullptr || find(*entries, "version") == nullptr) {
    return format_error(Errc::record_missing,
                        "the archive has no entry data.pkl or no entry version");
  }
  if (payload == nullptr || find(*entries, "data/1") != nullptr ||
      pickle->bytes > kMaxPickleBytes) {
    return format_error(Errc::pickle_unknown, "the archive does not hold exactly one tensor");
  }
  if (const ZipEntry* order = find(*entries, "byteorder"); order != nullptr) {
    auto at = data_offset(record, *order);
    if (!at) return at.error();
    auto text = record.at(*at, std::min<std::uint64_t>(order->bytes, 16));
    if (!text) return text.error();
    constexpr std::string_view kLittle = "little";
    if (!std::ranges::equal(*text, std::as_bytes(std::span(kLittle)))) {
      return format_error(Errc::pickle_unknown, "the payload is not little-endian");
    }
  }
  auto pickle_at = data_offset(record, *pickle);
  if (!pickle_at) return pickle_at.error();
  auto pickle_bytes = record.at(*pickle_at, pickle->bytes);
  if (!pickle_bytes) return pickle_bytes.error();
  // Check this before decoding: a damaged pickle may still decode, for example with wrong strides.
  TC_TRY(check_entry(*pickle_bytes, *pickle, *pickle_at));
  auto header = decode_tensor_pickle(*pickle_bytes);
  if (!header) return header.error();
  auto payload_at = data_offset(record, *payload);
  if (!payload_at) return payload_at.error();
  if (payload->bytes != header->storage_bytes) {
    return format_error(Errc::zip_inconsistent, "data.pkl describes " +
                                                    std::to_string(header->storage_bytes) +
                                                    " bytes of storage, but the archive has " +
                                                    std::to_string(payload->bytes));
  }
  if (!is_inside_storage(*header)) {
    return format_error(Errc::zip_inconsistent,
                        "data.pkl describes a tensor with elements outside its storage");
  }
  return RecordIndex{std::move(*header), *payload_at, payload->bytes, payload->crc};
}

Result<EntryCheck> check_entries(RecordBytes& record, std::string_view skip) {
  EntryCheck result;
  const std::uint64_t size = record.size();
  if (size < zip::kEndBytes) return result;
  const auto begins_with = [&](std::uint64_t offset, std::uint32_t signature) -> Result<bool> {
    auto bytes = record.at(offset, 4);
    if (!bytes) return bytes.error();
    return ByteReader(*bytes).number(4) == signature;
  };
  // One of the two signatures suffices, because the other may be damaged.
  auto head = begins_with(0, zip::kLocalHeader);
  if (!head) return head.error();
  auto tail = begins_with(size - zip::kEndBytes, zip::kEnd);
  if (!tail) return tail.error();
  if (!*head && !*tail) return result;
  result.is_archive = true;
  const auto visited = visit_entries(
      record, [&](const ZipEntry& entry, const Result<std::uint64_t>& at) -> Result<> {
        if (!at) return at.error();
        if (entry.name == skip || entry.bytes == 0) return {};
        if (entry.crc == 0) {
          ++result.without_crc;
          return {};
        }
        std::uint32_t crc = 0;
        for (std::uint64_t position = 0; position < entry.bytes; position += kReadBytes) {
          auto data = record.at(*at + position, std::min(kReadBytes, entry.bytes - position));
          if (!data) return data.error();
          crc = crc32(crc, *data);
        }
        return crc == entry.crc ? Result<>() : damaged_entry(entry, *at);
      });
  if (!visited) return visited.error();
  return result;
}

Result<> check_archive(RecordBytes& record) {
  Result<> intact;
  static_cast<void>(visit_entries(
      record, [&](const ZipEntry& entry, const Result<std::uint64_t>& at) -> Result<> {
        if (!at) return {};
        if (auto data = record.at(*at, entry.bytes)) intact = check_entry(*data, entry, *at);
        return intact;
      }));
  return intact;
}

}  // namespace torch_ckpt::format
