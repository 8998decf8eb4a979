#include "format/torch_record.h"

#include <vector>

#include "checked_math.h"
#include "format/crc32.h"
#include "format/little_endian.h"
#include "format/zip.h"

namespace torch_ckpt::format {
namespace {

constexpr std::string_view kPrefix = "archive/";
constexpr std::uint64_t kPayloadAlignment = 64;

// torch's hash of a tensor record's entry names, combined from their std::hash values
// (caffe2/serialize/inline_container.cc). Readers only log it. tests/python compares it with the
// hash that the installed torch writes.
constexpr std::string_view kRecordNamesHash = "15728199511854643026";

// Byte of the CRC-32 in a data descriptor, and in an entry of the central directory.
constexpr std::size_t kDescriptorCrcAt = 4;
constexpr std::size_t kDirectoryCrcAt = 16;

constexpr std::size_t kDigestDigits = 20;

struct ZipEntry {
  std::string name;
  std::uint64_t header_offset = 0;
  std::uint64_t bytes = 0;
  std::uint32_t crc = 0;
  // Positions in Archive::bytes(), which lack the payload.
  std::size_t data_at = 0;
  std::size_t descriptor_at = 0;
  std::size_t directory_at = 0;
};

std::span<const std::byte> as_bytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

// Adds the CRC-32 of an entry to torch's digest of the entries' CRC-32s.
void add_to_digest(std::uint64_t& digest, std::uint32_t crc) {
  digest ^= std::uint64_t{crc} + 0x9e3779b9 + (digest << 6) + (digest >> 2);
}

void overwrite(std::string& out, std::size_t at, std::string_view bytes) {
  out.replace(at, bytes.size(), bytes);
}

void overwrite_crc(std::string& out, std::size_t at, std::uint32_t crc) {
  std::string bytes;
  put(bytes, crc, 4);
  overwrite(out, at, bytes);
}

// Builds the archive around the payload. The payload itself is only counted, not stored.
class Archive {
 public:
  void add(std::string_view name, std::string_view data) {
    const std::uint32_t crc = crc32(0, as_bytes(data));
    add_header(name, data.size());
    out_ += data;
    add_descriptor(crc);
  }

  void add_header(std::string_view name, std::uint64_t bytes) {
    ZipEntry entry{std::string(kPrefix) + std::string(name), offset(), bytes, 0};
    std::string extra64;
    if (bytes >= zip::kMax32) {
      put(extra64, bytes, 8);
      put(extra64, 0, 8);
    }
    if (entry.header_offset >= zip::kMax32) put(extra64, entry.header_offset, 8);
    const std::uint64_t extra64_bytes = extra64.empty() ? 0 : 4 + extra64.size();
    const std::uint64_t before_padding =
        entry.header_offset + zip::kLocalHeaderBytes + entry.name.size() + extra64_bytes + 4;
    const std::uint64_t padding = align_up(before_padding, kPayloadAlignment) - before_padding;
    put(out_, zip::kLocalHeader, 4);
    put(out_, 0, 2);
    put(out_, flags(entry), 2);
    // Zeros for method, time and date, and for the CRC-32 and sizes, which are in the descriptor.
    out_.append(2 + 2 + 2 + 4 + 4 + 4, '\0');
    put(out_, entry.name.size(), 2);
    put(out_, extra64_bytes + 4 + padding, 2);
    out_ += entry.name;
    if (!extra64.empty()) {
      put(out_, zip::kExtraZip64, 2);
      put(out_, extra64.size(), 2);
      out_ += extra64;
    }
    out_ += "FB";
    put(out_, padding, 2);
    out_.append(padding, 'Z');
    entry.data_at = out_.size();
    entries_.push_back(std::move(entry));
  }

  void skip(std::uint64_t bytes) { skipped_ += bytes; }

  void add_descriptor(std::uint32_t crc) {
    ZipEntry& entry = entries_.back();
    entry.crc = crc;
    entry.descriptor_at = out_.size();
    if (entry.bytes == 0) return;
    put(out_, zip::kDescriptor, 4);
    put(out_, crc, 4);
    const std::size_t width = needs_zip64(entry) ? 8 : 4;
    put(out_, entry.bytes, width);
    put(out_, entry.bytes, width);
  }

  void finish() {
    const std::uint64_t directory_at = offset();
    for (ZipEntry& entry : entries_) add_directory_entry(entry);
    const std::uint64_t end64_at = offset();
    const std::uint64_t directory_bytes = end64_at - directory_at;
    put(out_, zip::kEnd64, 4);
    put(out_, zip::kEnd64Bytes - 12, 8);
    put(out_, 0x031e, 2);
    put(out_, 0x2d, 2);
    put(out_, 0, 8);
    put(out_, entries_.size(), 8);
    put(out_, entries_.size(), 8);
    put(out_, directory_bytes, 8);
    put(out_, directory_at, 8);
    put(out_, zip::kEnd64Locator, 4);
    put(out_, 0, 4);
    put(out_, end64_at, 8);
    put(out_, 1, 4);
    put(out_, zip::kEnd, 4);
    put(out_, 0, 4);
    put(out_, entries_.size(), 2);
    put(out_, entries_.size(), 2);
    put(out_, directory_bytes, 4);
    put(out_, directory_at >= zip::kMax32 ? zip::kMax32 : directory_at, 4);
    put(out_, 0, 2);
  }

  std::uint64_t offset() const { return out_.size() + skipped_; }
  const std::string& bytes() const { return out_; }
  const std::vector<ZipEntry>& entries() const { return entries_; }

 private:
  static std::uint16_t flags(const ZipEntry& entry) {
    return static_cast<std::uint16_t>(zip::kFlagUtf8 |
                                      (entry.bytes > 0 ? zip::kFlagDescriptor : 0));
  }
  static bool needs_zip64(const ZipEntry& entry) {
    return entry.bytes >= zip::kMax32 || entry.header_offset >= zip::kMax32;
  }

  void add_directory_entry(ZipEntry& entry) {
    entry.directory_at = out_.size();
    const bool long_size = entry.bytes >= zip::kMax32;
    const bool long_offset = entry.header_offset >= zip::kMax32;
    std::string extra64;
    if (long_size) {
      put(extra64, entry.bytes, 8);
      put(extra64, entry.bytes, 8);
    }
    if (long_offset) put(extra64, entry.header_offset, 8);
    put(out_, zip::kDirectoryEntry, 4);
    put(out_, 0, 4);
    put(out_, flags(entry), 2);
    out_.append(2 + 2 + 2, '\0');  // method, time, date
    put(out_, entry.crc, 4);
    put(out_, long_size ? zip::kMax32 : entry.bytes, 4);
    put(out_, long_size ? zip::kMax32 : entry.bytes, 4);
    put(out_, entry.name.size(), 2);
    put(out_, extra64.empty() ? 0 : 4 + extra64.size(), 2);
    out_.append(2 + 2 + 2 + 4, '\0');  // comment, disk, attributes
    put(out_, long_offset ? zip::kMax32 : entry.header_offset, 4);
    out_ += entry.name;
    if (!extra64.empty()) {
      put(out_, zip::kExtraZip64, 2);
      put(out_, extra64.size(), 2);
      out_ += extra64;
    }
  }

  std::string out_;
  std::uint64_t skipped_ = 0;
  std::vector<ZipEntry> entries_;
};

}  // namespace

RecordTemplate::RecordTemplate(std::string_view pickle, std::uint64_t payload_bytes) {
  Archive archive;
  archive.add("data.pkl", pickle);
  archive.add(".format_version", "1");
  archive.add(".storage_alignment", "64");
  archive.add("byteorder", "little");
  for (const ZipEntry& entry : archive.entries()) add_to_digest(head_digest_, entry.crc);
  archive.add_header("data/0", payload_bytes);
  head_ = archive.bytes();
  head_crc_ = crc32(0, as_bytes(head_));
  archive.skip(payload_bytes);
  archive.add_descriptor(0);
  archive.add("version", "3\n");
  archive.add(".data/serialization_id",
              std::string(kRecordNamesHash) + std::string(kDigestDigits, '0'));
  archive.finish();
  tail_ = archive.bytes().substr(head_.size());
  layout_ = {head_.size(), payload_bytes, tail_.size()};

  const auto at = [&](std::size_t position) { return position - head_.size(); };
  const auto tail_entries = archive.entries().end() - 3;
  const ZipEntry& payload = tail_entries[0];
  const ZipEntry& version = tail_entries[1];
  const ZipEntry& id = tail_entries[2];
  version_crc_ = version.crc;
  payload_crcs_at_ = {at(payload.descriptor_at) + kDescriptorCrcAt,
                      at(payload.directory_at) + kDirectoryCrcAt};
  id_at_ = at(id.data_at);
  id_crcs_at_ = {at(id.descriptor_at) + kDescriptorCrcAt, at(id.directory_at) + kDirectoryCrcAt};
}

std::string RecordTemplate::encode_tail(std::uint32_t payload_crc) const {
  std::string tail = tail_;
  std::uint64_t digest = head_digest_;
  // torch takes the CRC-32s from the descriptors, which empty entries lack.
  if (layout_.payload_bytes > 0) {
    for (const std::size_t at : payload_crcs_at_) overwrite_crc(tail, at, payload_crc);
    add_to_digest(digest, payload_crc);
  }
  add_to_digest(digest, version_crc_);
  const std::string digits = std::to_string(digest);
  const std::size_t id_bytes = kRecordNamesHash.size() + kDigestDigits;
  overwrite(tail, id_at_ + id_bytes - digits.size(), digits);
  const std::uint32_t id_crc = crc32(0, as_bytes(std::string_view(tail).substr(id_at_, id_bytes)));
  for (const std::size_t at : id_crcs_at_) overwrite_crc(tail, at, id_crc);
  return tail;
}

}  // namespace torch_ckpt::format
