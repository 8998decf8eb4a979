#include "engine/delta.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string_view>

#include "engine/parallel.h"
#include "engine/safetensors_headers.h"
#include "format/checksum_table.h"
#include "format/crc32.h"

namespace torch_ckpt::engine {
namespace {

using format::BlockChange;
using format::DeltaBlock;
using format::DeltaTensor;
using format::SafeTensor;

// The payloads of this many bytes of tensors are encoded concurrently, and then written.
constexpr std::uint64_t kWaveBytes = std::uint64_t{64} << 20;
constexpr std::uint64_t kReadBytes = std::uint64_t{8} << 20;

std::uint32_t crc_of(std::span<const std::byte> bytes) { return format::crc32(0, bytes); }

/// A block of a tensor: bytes [begin, begin + bytes) of its data.
struct Range {
  std::uint64_t begin = 0;
  std::uint64_t bytes = 0;
};

Range range_of(const SafeTensor& tensor, const format::RecordSums& sums, std::size_t block) {
  const std::uint64_t begin = block * sums.block_bytes;
  return {begin, std::min(sums.block_bytes, tensor.bytes - begin)};
}

/// The data of a tensor in a file.
struct StoredTensor {
  const os::File* file = nullptr;
  const SafeTensor* tensor = nullptr;
  format::RecordSums sums;  // without blocks if the tensor is empty or has no checksums

  Result<> read(const Range& range, std::span<std::byte> out) const {
    return file->read_at(out, tensor->begin + range.begin);
  }
};

Error at(Error error, const StoredTensor& stored, const Range& range) {
  error.subject = stored.tensor->name;
  error.path = stored.file->path();
  error.offset = stored.tensor->begin + range.begin;
  return error;
}

bool are_alike(const SafeTensor& one, const SafeTensor& other) {
  return one.dtype == other.dtype && one.sizes == other.sizes;
}

Result<std::vector<StoredTensor>> tensors_of(const ModelFile& file) {
  std::vector<StoredTensor> tensors;
  if (file.tensors.empty()) return tensors;
  const auto table = format::ChecksumTable::decode(std::as_bytes(std::span(file.checksums.table)));
  if (!table) return table.error();
  for (const SafeTensor& tensor : file.tensors) {
    StoredTensor& stored = tensors.emplace_back(StoredTensor{&file.file, &tensor, {}});
    if (tensor.bytes == 0) continue;
    if (auto sums = table->find(tensor.begin)) stored.sums = std::move(*sums);
  }
  return tensors;
}

using TensorsByName = std::map<std::string_view, StoredTensor>;

Result<TensorsByName> by_name(const std::vector<ModelFile>& files) {
  TensorsByName found;
  for (const ModelFile& file : files) {
    auto tensors = tensors_of(file);
    if (!tensors) return tensors.error();
    for (StoredTensor& stored : *tensors) found.emplace(stored.tensor->name, std::move(stored));
  }
  return found;
}

// --- write ---------------------------------------------------------------------------------------

// A block to encode.
struct Pending {
  const StoredTensor* version = nullptr;
  const StoredTensor* base = nullptr;  // nullptr if the base lacks the tensor
  std::size_t block = 0;
  DeltaBlock* change = nullptr;
  std::string payload = {};

  Range range() const { return range_of(*version->tensor, version->sums, block); }
};

Result<> read_checked(const StoredTensor& stored, std::size_t block, const Range& range,
                      std::span<std::byte> out) {
  if (auto read = stored.read(range, out); !read) return read;
  if (crc_of(out) == stored.sums.block_crcs[block]) return {};
  return at(format_error(Errc::checksum_mismatch, "the data does not match its checksum"), stored,
            range);
}

Result<> encode(Pending& pending) {
  const Range range = pending.range();
  std::vector<std::byte> version(range.bytes);
  if (auto read = read_checked(*pending.version, pending.block, range, version); !read) return read;
  if (pending.base == nullptr) {
    *pending.change = format::encode_full_block(version, pending.payload);
    return {};
  }
  std::vector<std::byte> base(range.bytes);
  if (auto read = read_checked(*pending.base, pending.block, range, base); !read) return read;
  const std::size_t item_bytes = pending.version->tensor->dtype->item_bytes;
  *pending.change = format::encode_change(base, version, item_bytes, pending.payload);
  pending.change->base_crc = pending.base->sums.block_crcs[pending.block];
  return {};
}

Result<std::uint64_t> write_payloads(Context& context, std::span<Pending> blocks, os::File& out,
                                     std::uint64_t offset) {
  while (!blocks.empty()) {
    std::size_t count = 0;
    for (std::uint64_t bytes = 0; count < blocks.size() && bytes < kWaveBytes; ++count) {
      bytes += blocks[count].range().bytes;
    }
    const auto wave = blocks.first(count);
    blocks = blocks.subspan(count);
    auto encoded =
        run_parallel(context, count, "write_delta", [&](std::size_t i) { return encode(wave[i]); });
    if (!encoded) return encoded.error();
    std::vector<std::uint64_t> offsets;
    for (const Pending& pending : wave) {
      offsets.push_back(offset);
      offset += pending.payload.size();
    }
    auto written = run_parallel(context, count, "write_delta", [&](std::size_t i) {
      const std::string payload = std::exchange(wave[i].payload, {});
      return out.write_at(std::as_bytes(std::span(payload)), offsets[i]);
    });
    if (!written) return written.error();
  }
  return offset;
}

}  // namespace

Result<> write_delta(Context& context, const os::Directory& base, std::string name,
                     const os::Directory& version, bool sync) {
  const auto base_files = read_model_files(base);
  if (!base_files) return base_files.error();
  auto files = read_model_files(version);
  if (!files) return files.error();
  const auto in_base = by_name(*base_files);
  if (!in_base) return in_base.error();

  format::DeltaContents contents{std::move(name), {}};
  std::vector<std::vector<StoredTensor>> stored;  // by file
  for (const ModelFile& file : *files) {
    auto tensors = tensors_of(file);
    if (!tensors) return tensors.error();
    const auto& checksums = file.checksums;
    contents.files.push_back({.name = checksums.name,
                              .bytes = checksums.bytes,
                              .has_tensors = !checksums.table.empty(),
                              .start = file.start,
                              .table = checksums.table,
                              .tensors = {},
                              .changes = std::vector<DeltaTensor>(tensors->size())});
    stored.push_back(std::move(*tensors));
  }
  std::vector<Pending> blocks;
  for (std::size_t i = 0; i < stored.size(); ++i) {
    for (std::size_t j = 0; j < stored[i].size(); ++j) {
      const StoredTensor& tensor = stored[i][j];
      const auto found = in_base->find(tensor.tensor->name);
      const StoredTensor* old = found == in_base->end() ? nullptr : &found->second;
      if (old != nullptr && (!are_alike(*old->tensor, *tensor.tensor) ||
                             old->sums.block_bytes != tensor.sums.block_bytes)) {
        old = nullptr;
      }
      DeltaTensor& change = contents.files[i].changes[j];
      change.is_in_base = old != nullptr;
      change.blocks.resize(tensor.sums.block_crcs.size());
      for (std::size_t block = 0; block < change.blocks.size(); ++block) {
        blocks.push_back({&tensor, old, block, &change.blocks[block]});
      }
    }
  }
  auto out = version.create(std::string(format::kDeltaName), os::IoMode::buffered);
  if (!out) return out.error();
  const auto magic = std::as_bytes(std::span(format::kDeltaMagic));
  if (auto written = out->write_at(magic, 0); !written) return written;
  const auto end = write_payloads(context, blocks, *out, magic.size());
  if (!end) return end.error();
  const std::string last = format::encode_delta_end(contents);
  auto done = out->write_at(std::as_bytes(std::span(last)), *end);
  if (done && sync) done = out->sync();
  if (done) done = std::move(*out).close();
  return done && sync ? version.sync() : done;
}

// --- apply ---------------------------------------------------------------------------------------

namespace {

/// A block of a tensor of a delta.
struct Block {
  Delta::Tensor of;
  std::size_t tensor = 0;  // number of the tensor in Delta::tensors()
  std::size_t number = 0;  // of the block in the tensor

  const DeltaBlock& change() const { return of.change->blocks[number]; }
  Range range() const { return range_of(*of.tensor, of.change->sums, number); }
  std::size_t item_bytes() const { return of.tensor->dtype->item_bytes; }
};

std::vector<Block> blocks_of(const std::vector<Delta::Tensor>& tensors) {
  std::vector<Block> blocks;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    for (std::size_t j = 0; j < tensors[i].change->blocks.size(); ++j) {
      blocks.push_back({tensors[i], i, j});
    }
  }
  return blocks;
}

Error in_tensor(Errc code, std::string_view tensor, std::string detail) {
  Error error = format_error(code, std::move(detail));
  error.subject = tensor;
  return error;
}

Result<> check_payload(const Block& block, std::span<const std::byte> payload) {
  const std::uint64_t bytes = block.range().bytes;
  if (format::is_valid_payload(block.change(), payload, bytes, block.item_bytes())) return {};
  return in_tensor(Errc::checksum_mismatch, block.of.tensor->name,
                   "the delta is damaged at byte " + std::to_string(block.change().begin));
}

Result<> check_base(const Block& block, std::span<const std::byte> found, const std::string& base) {
  if (!block.of.change->is_in_base || crc_of(found) == block.change().base_crc) return {};
  return in_tensor(Errc::wrong_base, block.of.tensor->name,
                   "the tensor does not have the values of the base (" + base + ") from byte " +
                       std::to_string(block.range().begin) +
                       "; apply the delta to its base, or load the version instead");
}

/// Finds the targets that are the same memory as another target with the same changes. Fails if
/// targets share memory in any other way.
Result<std::vector<bool>> find_repeated(const std::vector<Delta::Tensor>& tensors,
                                        std::span<const std::span<std::byte>> targets) {
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    if (!targets[i].empty()) order.push_back(i);
  }
  std::ranges::sort(order, {}, [&](std::size_t i) { return targets[i].data(); });
  const auto have_same_changes = [](const DeltaTensor& one, const DeltaTensor& other) {
    const auto base_crc = [](const DeltaBlock& block) { return block.base_crc; };
    return one.is_in_base == other.is_in_base && one.sums.block_crcs == other.sums.block_crcs &&
           std::ranges::equal(one.blocks, other.blocks, {}, base_crc, base_crc);
  };
  std::vector<bool> is_repeated(targets.size());
  for (std::size_t n = 1; n < order.size(); ++n) {
    const std::size_t before = order[n - 1];
    const std::size_t after = order[n];
    if (targets[before].data() + targets[before].size() <= targets[after].data()) continue;
    if (targets[before].data() != targets[after].data() ||
        targets[before].size() != targets[after].size() ||
        !have_same_changes(*tensors[before].change, *tensors[after].change)) {
      return in_tensor(Errc::invalid_argument, tensors[after].tensor->name,
                       "the tensor shares memory with " + tensors[before].tensor->name +
                           ", but the delta changes them in different ways");
    }
    is_repeated[after] = true;
  }
  return is_repeated;
}

}  // namespace

Result<Delta> Delta::read(Context& context, const os::File& file) {
  const auto bytes = file.size();
  if (!bytes) return bytes.error();
  // Not initialized: the threads that read touch the pages first.
  auto contents = std::make_unique_for_overwrite<std::byte[]>(*bytes);
  const std::span out(contents.get(), *bytes);
  const std::size_t pieces = out.size() / kReadBytes + (out.size() % kReadBytes != 0 ? 1 : 0);
  auto read = run_parallel(context, pieces, "read", [&](std::size_t i) {
    const std::uint64_t begin = i * kReadBytes;
    return file.read_at(out.subspan(begin, std::min(kReadBytes, out.size() - begin)), begin);
  });
  if (!read) return read.error();
  auto decoded = format::decode_delta(out);
  if (!decoded) {
    Error error = decoded.error();
    error.path = file.path();
    return error;
  }
  return Delta(std::move(contents), std::move(*decoded));
}

std::vector<Delta::Tensor> Delta::tensors() const {
  std::vector<Tensor> tensors;
  for (const format::DeltaFile& file : contents_.files) {
    for (std::size_t i = 0; i < file.tensors.size(); ++i) {
      tensors.push_back({&file.tensors[i], &file.changes[i]});
    }
  }
  return tensors;
}

std::span<const std::byte> Delta::payload_of(const DeltaBlock& block) const {
  return {bytes_.get() + block.begin, block.bytes};
}

Result<> Delta::apply(Context& context, std::span<const std::span<std::byte>> targets) const {
  const std::vector<Tensor> all = tensors();
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (targets[i].size() == all[i].tensor->bytes) continue;
    return in_tensor(Errc::invalid_argument, all[i].tensor->name,
                     "the tensor has " + std::to_string(targets[i].size()) + " bytes instead of " +
                         std::to_string(all[i].tensor->bytes));
  }
  const auto is_repeated = find_repeated(all, targets);
  if (!is_repeated) return is_repeated.error();
  std::vector<Block> blocks = blocks_of(all);
  std::erase_if(blocks, [&](const Block& block) { return (*is_repeated)[block.tensor]; });
  const auto target_of = [&](const Block& block) {
    const auto [begin, bytes] = block.range();
    return targets[block.tensor].subspan(begin, bytes);
  };
  // Blocks that change in part are changed right after they were checked, because they are still in
  // the processor's caches. Their former elements are kept until all blocks are checked.
  std::vector<std::vector<std::byte>> former(blocks.size());
  auto changed = run_parallel(context, blocks.size(), "apply_delta", [&](std::size_t i) {
    const Block& block = blocks[i];
    const auto payload = payload_of(block.change());
    const auto target = target_of(block);
    auto checked = check_payload(block, payload);
    if (checked) checked = check_base(block, target, base());
    if (!checked || block.change().change != BlockChange::sparse) return checked;
    const auto elements = format::sparse_elements(payload, block.item_bytes());
    former[i].assign(elements.begin(), elements.end());
    format::exchange_elements(payload, former[i], target, block.item_bytes());
    return checked;
  });
  if (!changed) {
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      if (former[i].empty()) continue;
      format::exchange_elements(payload_of(blocks[i].change()), former[i], target_of(blocks[i]),
                                blocks[i].item_bytes());
    }
    return changed;
  }
  return run_parallel(context, blocks.size(), "apply_delta", [&](std::size_t i) -> Result<> {
    const Block& block = blocks[i];
    if (block.change().change != BlockChange::full) return {};
    format::apply_change(BlockChange::full, payload_of(block.change()), target_of(block),
                         block.item_bytes());
    return {};
  });
}

Result<> Delta::write_files(Context& context, const os::Directory& base,
                            const os::Directory& to) const {
  const auto base_files = read_model_files(base);
  if (!base_files) return base_files.error();
  const auto in_base = by_name(*base_files);
  if (!in_base) return in_base.error();
  const std::vector<Tensor> all = tensors();
  std::vector<const StoredTensor*> sources;  // by tensor; nullptr if the base lacks it
  for (const Tensor& tensor : all) {
    const auto found = in_base->find(tensor.tensor->name);
    const bool is_there =
        found != in_base->end() && are_alike(*found->second.tensor, *tensor.tensor);
    if (tensor.change->is_in_base && !is_there) {
      return in_tensor(Errc::wrong_base, tensor.tensor->name,
                       base.path() + " does not contain the tensor that the base (" + this->base() +
                           ") has; apply the delta to its base");
    }
    sources.push_back(tensor.change->is_in_base ? &found->second : nullptr);
  }
  std::vector<os::File> files;
  std::vector<std::size_t> file_of;  // by tensor
  for (const format::DeltaFile& file : contents_.files) {
    if (!file.has_tensors) continue;
    auto created = to.create(file.name, os::IoMode::buffered);
    if (!created) return created.error();
    auto written = created->write_at(std::as_bytes(std::span(file.start)), 0);
    if (!written) return written;
    file_of.insert(file_of.end(), file.tensors.size(), files.size());
    files.push_back(std::move(*created));
  }
  const std::vector<Block> blocks = blocks_of(all);
  auto written = run_parallel(context, blocks.size(), "apply_delta", [&](std::size_t i) {
    const Block& block = blocks[i];
    const auto range = block.range();
    const auto payload = payload_of(block.change());
    if (auto valid = check_payload(block, payload); !valid) return valid;
    std::vector<std::byte> data(range.bytes);
    if (const StoredTensor* source = sources[block.tensor]) {
      if (auto read = source->read(range, data); !read) return read;
      if (auto checked = check_base(block, data, this->base()); !checked) return checked;
    }
    format::apply_change(block.change().change, payload, data, block.item_bytes());
    if (crc_of(data) != block.of.change->sums.block_crcs[block.number]) {
      return Result<>(in_tensor(Errc::checksum_mismatch, block.of.tensor->name,
                                "the delta does not yield the version's values"));
    }
    return files[file_of[block.tensor]].write_at(data, block.of.tensor->begin + range.begin);
  });
  if (!written) return written;
  for (os::File& file : files) {
    if (auto closed = std::move(file).close(); !closed) return closed;
  }
  return {};
}

}  // namespace torch_ckpt::engine
