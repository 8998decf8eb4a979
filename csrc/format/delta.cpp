#include "format/delta.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <optional>
#include <type_traits>
#include <utility>

#include "checked_math.h"
#include "format/crc32.h"
#include "format/little_endian.h"

namespace torch_ckpt::format {
namespace {

constexpr std::size_t kCountBytes = 4;
constexpr std::size_t kMaxUnit = 8;
constexpr std::size_t kWordBytes = 8;
constexpr std::size_t kFooterBytes = 8 + 4 + kDeltaMagic.size();
constexpr std::size_t kBlockBytes = 1 + 4 + 4 + 4;
constexpr std::uint64_t kLongGap = 255;

std::size_t unit_of(std::size_t item_bytes) { return std::min(item_bytes, kMaxUnit); }

std::uint64_t word_at(const std::byte* bytes) {
  std::uint64_t word = 0;
  std::memcpy(&word, bytes, kWordBytes);
  return word;
}

// The changed elements of a block, in the order of their places.
class Changes {
 public:
  explicit Changes(std::size_t unit) : unit_(unit) {}

  /// Adds the element at this offset.
  void add(std::size_t at, std::span<const std::byte> version) {
    std::uint64_t gap = (at - next_) / unit_;
    for (; gap >= kLongGap; gap -= kLongGap) gaps_.push_back(static_cast<char>(kLongGap));
    gaps_.push_back(static_cast<char>(gap));
    elements_.append(reinterpret_cast<const char*>(&version[at]), unit_);
    next_ = at + unit_;
  }

  /// Number of bytes in a payload.
  std::size_t bytes() const { return kCountBytes + gaps_.size() + elements_.size(); }
  bool empty() const { return elements_.empty(); }
  void encode(std::string& out) const {
    put(out, elements_.size() / unit_, kCountBytes);
    out += gaps_;
    out += elements_;
  }

 private:
  std::size_t unit_;
  std::size_t next_ = 0;  // end of the last element
  std::string gaps_;
  std::string elements_;
};

/// Returns nullopt if the changes need at least as many bytes as the block.
template <std::size_t kUnit>
std::optional<Changes> collect(std::span<const std::byte> base,
                               std::span<const std::byte> version) {
  constexpr std::size_t kUnitBits = 8 * kUnit;
  constexpr std::uint64_t kUnitMask = ~std::uint64_t{0} >> (64 - kUnitBits);
  Changes changes(kUnit);
  std::size_t at = 0;
  for (; at + kWordBytes <= base.size(); at += kWordBytes) {
    std::uint64_t differs = word_at(&base[at]) ^ word_at(&version[at]);
    while (differs != 0) {
      const auto element = static_cast<std::size_t>(std::countr_zero(differs)) / kUnitBits;
      differs &= ~(kUnitMask << (element * kUnitBits));
      changes.add(at + element * kUnit, version);
    }
    if (changes.bytes() >= base.size()) return std::nullopt;
  }
  for (; at < base.size(); at += kUnit) {
    if (std::memcmp(&base[at], &version[at], kUnit) != 0) changes.add(at, version);
  }
  return changes.bytes() < base.size() ? std::optional(std::move(changes)) : std::nullopt;
}

/// The parts of a sparse payload.
struct Sparse {
  std::uint64_t count = 0;
  std::span<const std::byte> gaps;
  std::span<const std::byte> elements;
};

/// Returns nullopt if the payload is too short.
std::optional<Sparse> split(std::span<const std::byte> payload, std::size_t unit) {
  ByteReader reader(payload);
  Sparse sparse;
  sparse.count = reader.number(kCountBytes);
  const std::uint64_t bytes = sparse.count * unit;
  if (reader.has_failed() || bytes > reader.left()) return std::nullopt;
  sparse.gaps = reader.take(reader.left() - bytes);
  sparse.elements = reader.take(bytes);
  return sparse;
}

/// Calls `visit` with the address of each changed element and its address in `elements`.
template <std::size_t kUnit, class Element, class Visit>
void visit_elements(std::span<const std::byte> gaps, std::span<Element> elements,
                    std::span<std::byte> block, Visit visit) {
  std::byte* at = block.data();
  Element* element = elements.data();
  for (const std::byte gap : gaps) {
    at += static_cast<std::size_t>(gap) * kUnit;
    if (static_cast<std::uint64_t>(gap) == kLongGap) continue;
    visit(at, element);
    at += kUnit;
    element += kUnit;
  }
}

template <std::size_t kUnit>
void exchange(std::span<const std::byte> gaps, std::span<std::byte> elements,
              std::span<std::byte> block) {
  visit_elements<kUnit>(gaps, elements, block, [](std::byte* at, std::byte* element) {
    std::array<std::byte, kUnit> old;
    std::memcpy(old.data(), at, kUnit);
    std::memcpy(at, element, kUnit);
    std::memcpy(element, old.data(), kUnit);
  });
}

template <std::size_t kUnit>
void apply(const Sparse& sparse, std::span<std::byte> block) {
  visit_elements<kUnit>(
      sparse.gaps, sparse.elements, block,
      [](std::byte* at, const std::byte* element) { std::memcpy(at, element, kUnit); });
}

/// Calls `function` with a constant: the number of bytes that count as an element.
template <class Function>
void with_unit(std::size_t item_bytes, Function function) {
  switch (unit_of(item_bytes)) {
    case 1:
      return function(std::integral_constant<std::size_t, 1>());
    case 2:
      return function(std::integral_constant<std::size_t, 2>());
    case 4:
      return function(std::integral_constant<std::size_t, 4>());
    default:
      return function(std::integral_constant<std::size_t, kMaxUnit>());
  }
}

DeltaBlock block_of(BlockChange change, std::string_view payload) {
  return {change, static_cast<std::uint32_t>(payload.size()),
          crc32(0, std::as_bytes(std::span(payload))), 0, 0};
}

Error inconsistent(std::string detail) {
  return format_error(Errc::metadata_inconsistent, std::move(detail));
}

Error damaged() {
  return format_error(Errc::checksum_mismatch, "the file is not a complete, undamaged delta");
}

/// Reads the changes of tensors, and assigns the places of their payloads.
class ContentsReader {
 public:
  explicit ContentsReader(std::span<const std::byte> contents, std::uint64_t payload_end)
      : reader_(contents), payload_end_(payload_end) {}

  Result<DeltaContents> read() {
    DeltaContents contents;
    contents.base = reader_.text32();
    const auto checksums = decode_safe_checksums(reader_.take(reader_.number(4)));
    if (reader_.has_failed()) return inconsistent("the delta ends within its contents");
    if (!checksums) return checksums.error();
    for (const SafeChecksums& sums : *checksums) {
      if (sums.name == kSafeChecksumsName || sums.name == kDeltaName) {
        return inconsistent("the delta contains a file named " + sums.name);
      }
      auto file = read_file(sums);
      if (!file) return file.error();
      contents.files.push_back(std::move(*file));
    }
    if (reader_.has_failed() || reader_.left() != 0 || begin_ != payload_end_) {
      return inconsistent("the delta does not have the length of its contents");
    }
    return contents;
  }

 private:
  Result<DeltaFile> read_file(const SafeChecksums& sums) {
    DeltaFile file{.name = sums.name,
                   .bytes = sums.bytes,
                   .has_tensors = !sums.table.empty(),
                   .start = std::string(reader_.text32()),
                   .table = sums.table,
                   .tensors = {},
                   .changes = {}};
    const auto start = std::as_bytes(std::span(file.start));
    if (reader_.has_failed() || crc32(0, start) != sums.header_crc) {
      return inconsistent("the delta does not contain the beginning of " + file.name);
    }
    if (!file.has_tensors) {
      if (file.start.size() == file.bytes) return file;
      return inconsistent("the delta does not contain all bytes of " + file.name);
    }
    const auto length = safetensors_header_bytes(start, file.bytes);
    if (!length) return length.error();
    if (*length != file.start.size() - kSafeLengthBytes) {
      return inconsistent("the header of " + file.name + " has an invalid length");
    }
    auto header = decode_safetensors_header(std::string_view(file.start).substr(kSafeLengthBytes),
                                            file.bytes);
    if (!header) return header.error();
    file.tensors = std::move(header->tensors);
    const auto table = ChecksumTable::decode(std::as_bytes(std::span(file.table)));
    if (!table) return table.error();
    for (const SafeTensor& tensor : file.tensors) {
      auto read = read_tensor(tensor, *table);
      if (!read) return read.error();
      file.changes.push_back(std::move(*read));
    }
    return file;
  }

  Result<DeltaTensor> read_tensor(const SafeTensor& tensor, const ChecksumTable& table) {
    DeltaTensor read;
    read.is_in_base = reader_.number(1) == 1;
    if (tensor.bytes == 0) return read;
    auto sums = table.find(tensor.begin);
    const auto fits = [&] {
      const std::uint64_t block = sums->block_bytes;
      return block % tensor.dtype->item_bytes == 0 &&
             sums->block_crcs.size() == divide_up(tensor.bytes, block);
    };
    if (!sums || sums->block_bytes == 0 || !fits()) {
      return inconsistent("the delta lacks the checksums of " + tensor.name);
    }
    read.sums = std::move(*sums);
    if (read.sums.block_crcs.size() > reader_.left() / kBlockBytes) {
      return inconsistent("the delta ends within its contents");
    }
    read.blocks.resize(read.sums.block_crcs.size());
    for (DeltaBlock& block : read.blocks) {
      const std::uint64_t change = reader_.number(1);
      block.change = static_cast<BlockChange>(change);
      block.bytes = static_cast<std::uint32_t>(reader_.number(4));
      block.crc = static_cast<std::uint32_t>(reader_.number(4));
      block.base_crc = static_cast<std::uint32_t>(reader_.number(4));
      block.begin = begin_;
      const std::uint32_t crc = read.sums.block_crcs[&block - read.blocks.data()];
      const bool is_consistent =
          block.change == BlockChange::sparse ||
          (block.change == BlockChange::full ? block.crc == crc : block.base_crc == crc);
      if (change > static_cast<std::uint64_t>(BlockChange::full) ||
          !inside(begin_, block.bytes, payload_end_) || !is_consistent ||
          (!read.is_in_base && block.change != BlockChange::full)) {
        return inconsistent("the delta has an invalid block of " + tensor.name);
      }
      begin_ += block.bytes;
    }
    return read;
  }

  ByteReader reader_;
  const std::uint64_t payload_end_;
  std::uint64_t begin_ = kDeltaMagic.size();
};

}  // namespace

DeltaBlock encode_change(std::span<const std::byte> base, std::span<const std::byte> version,
                         std::size_t item_bytes, std::string& out) {
  if (std::ranges::equal(base, version)) return block_of(BlockChange::none, {});
  std::optional<Changes> changes;
  with_unit(item_bytes, [&](auto unit) { changes = collect<unit()>(base, version); });
  if (!changes) return encode_full_block(version, out);
  const std::size_t begin = out.size();
  changes->encode(out);
  return block_of(BlockChange::sparse, std::string_view(out).substr(begin));
}

DeltaBlock encode_full_block(std::span<const std::byte> version, std::string& out) {
  out.append(reinterpret_cast<const char*>(version.data()), version.size());
  return block_of(BlockChange::full, std::string_view(out).substr(out.size() - version.size()));
}

bool is_valid_payload(const DeltaBlock& block, std::span<const std::byte> payload,
                      std::uint64_t block_bytes, std::size_t item_bytes) {
  if (payload.size() != block.bytes || crc32(0, payload) != block.crc) return false;
  if (block.change == BlockChange::none) return payload.empty();
  if (block.change == BlockChange::full) return payload.size() == block_bytes;
  const std::size_t unit = unit_of(item_bytes);
  const auto sparse = split(payload, unit);
  if (!sparse) return false;
  // Each change moves by at least one element, so no sum overflows.
  std::uint64_t elements = block_bytes / unit;
  std::uint64_t changes = 0;
  std::uint64_t gap = 0;
  for (const std::byte byte : sparse->gaps) {
    gap += static_cast<std::uint64_t>(byte);
    if (static_cast<std::uint64_t>(byte) == kLongGap) continue;
    if (gap >= elements) return false;
    elements -= gap + 1;
    gap = 0;
    ++changes;
  }
  return gap == 0 && changes == sparse->count;
}

std::span<const std::byte> sparse_elements(std::span<const std::byte> payload,
                                           std::size_t item_bytes) {
  return split(payload, unit_of(item_bytes))->elements;
}

void exchange_elements(std::span<const std::byte> payload, std::span<std::byte> elements,
                       std::span<std::byte> block, std::size_t item_bytes) {
  const Sparse sparse = *split(payload, unit_of(item_bytes));
  with_unit(item_bytes, [&](auto unit) { exchange<unit()>(sparse.gaps, elements, block); });
}

void apply_change(BlockChange change, std::span<const std::byte> payload,
                  std::span<std::byte> block, std::size_t item_bytes) {
  if (change == BlockChange::none) return;
  if (change == BlockChange::full) {
    std::ranges::copy(payload, block.begin());
    return;
  }
  const Sparse sparse = *split(payload, unit_of(item_bytes));
  with_unit(item_bytes, [&](auto unit) { apply<unit()>(sparse, block); });
}

std::string encode_delta_end(const DeltaContents& contents) {
  std::string out;
  put_text32(out, contents.base);
  std::vector<SafeChecksums> checksums;
  for (const DeltaFile& file : contents.files) {
    const std::uint32_t crc = crc32(0, std::as_bytes(std::span(file.start)));
    checksums.push_back({file.name, file.bytes, crc, file.table});
  }
  put_text32(out, encode_safe_checksums(checksums));
  for (const DeltaFile& file : contents.files) {
    put_text32(out, file.start);
    for (const DeltaTensor& tensor : file.changes) {
      put(out, tensor.is_in_base ? 1 : 0, 1);
      for (const DeltaBlock& block : tensor.blocks) {
        put(out, static_cast<std::uint64_t>(block.change), 1);
        put(out, block.bytes, 4);
        put(out, block.crc, 4);
        put(out, block.base_crc, 4);
      }
    }
  }
  put(out, out.size(), 8);
  put(out, crc32(0, std::as_bytes(std::span(out))), 4);
  out += kDeltaMagic;
  return out;
}

Result<DeltaContents> decode_delta(std::span<const std::byte> delta) {
  const auto magic = std::as_bytes(std::span(kDeltaMagic));
  if (delta.size() < magic.size() + kFooterBytes ||
      !std::ranges::equal(delta.first(magic.size()), magic) ||
      !std::ranges::equal(delta.last(magic.size()), magic)) {
    return damaged();
  }
  const auto footer = delta.last(kFooterBytes);
  const std::uint64_t bytes = little_endian(footer.first(8));
  const std::uint64_t before = delta.size() - kFooterBytes;
  if (bytes > before - magic.size()) return damaged();
  const std::uint64_t payload_end = before - bytes;
  if (crc32(0, delta.subspan(payload_end, bytes + 8)) != little_endian(footer.subspan(8, 4))) {
    return damaged();
  }
  return ContentsReader(delta.subspan(payload_end, bytes), payload_end).read();
}

}  // namespace torch_ckpt::format
