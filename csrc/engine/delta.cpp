#include "engine/delta.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string_view>

#include "checked_math.h"
#include "engine/data_files.h"
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
  DataFiles* files = nullptr;
  std::size_t file = 0;
  const SafeTensor* tensor = nullptr;
  format::RecordSums sums;  // without blocks if the tensor is empty or has no checksums

  /// DataFiles::expect_unit() must have been called for each read.
  Result<> read(const Range& range, std::span<std::byte> out) const {
    const auto read = [&]() -> Result<> {
      const auto opened = files->acquire(file);
      return opened ? (*opened)->read(out, tensor->begin + range.begin) : opened.error();
    }();
    files->release(file);
    return read;
  }
};

Error at(Error error, const StoredTensor& stored, const Range& range) {
  error.subject = stored.tensor->name;
  error.path = stored.files->path(stored.file);
  error.offset = stored.tensor->begin + range.begin;
  return error;
}

bool are_identical(const SafeTensor& one, const SafeTensor& other) {
  return one.dtype == other.dtype && one.sizes == other.sizes;
}

// A directory of safetensors files with checksums, and its tensors.
class StoredModel {
 public:
  static Result<std::unique_ptr<StoredModel>> open(const os::Directory& directory) {
    auto reopened = directory.reopen();
    if (!reopened) return reopened.error();
    Folder folder(std::move(*reopened));
    auto files = read_model_files(folder);
    if (!files) return files.error();
    auto model =
        std::unique_ptr<StoredModel>(new StoredModel(std::move(*files), std::move(folder)));
    TC_TRY(model->add_tensors());
    return model;
  }

  const std::vector<ModelFile>& files() const { return files_; }
  /// The tensors of a file, in the order of its header.
  std::span<const StoredTensor> tensors(std::size_t file) const { return tensors_[file]; }
  /// Returns nullptr if there is no such tensor.
  const StoredTensor* find(std::string_view name) const {
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? nullptr : found->second;
  }

 private:
  StoredModel(std::vector<ModelFile> files, Folder folder)
      : files_(std::move(files)), opened_(std::move(folder), names_of(files_), DirectIo::off) {}

  static std::vector<std::string> names_of(const std::vector<ModelFile>& files) {
    std::vector<std::string> names;
    for (const ModelFile& file : files) names.push_back(file.checksums.name);
    return names;
  }

  Result<> add_tensors() {
    tensors_.resize(files_.size());
    for (std::size_t i = 0; i < files_.size(); ++i) {
      if (files_[i].tensors.empty()) continue;
      const std::string& bytes = files_[i].checksums.table;
      const auto table = format::ChecksumTable::decode(std::as_bytes(std::span(bytes)));
      if (!table) return table.error();
      for (const SafeTensor& tensor : files_[i].tensors) {
        StoredTensor& stored = tensors_[i].emplace_back(StoredTensor{&opened_, i, &tensor, {}});
        if (tensor.bytes == 0) continue;
        auto sums = table->find(tensor.begin);
        if (!sums || sums->block_bytes == 0 ||
            sums->block_crcs.size() != divide_up(tensor.bytes, sums->block_bytes)) {
          return at(format_error(Errc::table_inconsistent, "the checksums do not fit the tensor"),
                    stored, {});
        }
        stored.sums = std::move(*sums);
      }
    }
    for (const auto& of_file : tensors_) {
      for (const StoredTensor& stored : of_file) by_name_.emplace(stored.tensor->name, &stored);
    }
    return {};
  }

  std::vector<ModelFile> files_;
  DataFiles opened_;
  std::vector<std::vector<StoredTensor>> tensors_;  // by file
  std::map<std::string_view, const StoredTensor*> by_name_;
};

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
  TC_TRY(stored.read(range, out));
  if (crc_of(out) == stored.sums.block_crcs[block]) return {};
  return at(format_error(Errc::checksum_mismatch, "the data does not match its checksum"), stored,
            range);
}

Result<> encode(Pending& pending) {
  const Range range = pending.range();
  std::vector<std::byte> version(range.bytes);
  TC_TRY(read_checked(*pending.version, pending.block, range, version));
  if (pending.base == nullptr) {
    *pending.change = format::encode_full_block(version, pending.payload);
    return {};
  }
  std::vector<std::byte> base(range.bytes);
  TC_TRY(read_checked(*pending.base, pending.block, range, base));
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
  const auto from = StoredModel::open(base);
  if (!from) return from.error();
  const auto to = StoredModel::open(version);
  if (!to) return to.error();
  format::DeltaContents contents{std::move(name), {}};
  for (std::size_t i = 0; i < (*to)->files().size(); ++i) {
    const ModelFile& file = (*to)->files()[i];
    contents.files.push_back({.name = file.checksums.name,
                              .bytes = file.checksums.bytes,
                              .has_tensors = !file.checksums.table.empty(),
                              .start = file.start,
                              .table = file.checksums.table,
                              .tensors = {},
                              .changes = std::vector<DeltaTensor>((*to)->tensors(i).size())});
  }
  std::vector<Pending> blocks;
  for (std::size_t i = 0; i < contents.files.size(); ++i) {
    for (std::size_t j = 0; j < contents.files[i].changes.size(); ++j) {
      const StoredTensor& tensor = (*to)->tensors(i)[j];
      const StoredTensor* old = (*from)->find(tensor.tensor->name);
      if (old != nullptr && (!are_identical(*old->tensor, *tensor.tensor) ||
                             old->sums.block_bytes != tensor.sums.block_bytes)) {
        old = nullptr;
      }
      DeltaTensor& change = contents.files[i].changes[j];
      change.is_in_base = old != nullptr;
      change.blocks.resize(tensor.sums.block_crcs.size());
      for (std::size_t block = 0; block < change.blocks.size(); ++block) {
        blocks.push_back({&tensor, old, block, &change.blocks[block]});
        tensor.files->expect_unit(tensor.file);
        if (old != nullptr) old->files->expect_unit(old->file);
      }
    }
  }
  auto out = version.create(std::string(format::kDeltaName), os::IoMode::buffered);
  if (!out) return out.error();
  const auto magic = std::as_bytes(std::span(format::kDeltaMagic));
  TC_TRY(out->write_at(magic, 0));
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

/// Writes a block of a file of the version. source: the tensor of the base; nullptr if it lacks it.
Result<> write_block(const Block& block, std::span<const std::byte> payload,
                     const StoredTensor* source, const std::string& base, os::File& out) {
  const auto range = block.range();
  std::vector<std::byte> data(range.bytes);
  const auto read = source == nullptr ? Result<>() : source->read(range, data);
  if (!read) return read;
  TC_TRY(check_payload(block, payload));
  TC_TRY(check_base(block, data, base));
  format::apply_change(block.change().change, payload, data, block.item_bytes());
  if (crc_of(data) != block.of.change->sums.block_crcs[block.number]) {
    return in_tensor(Errc::checksum_mismatch, block.of.tensor->name,
                     "the delta does not yield the version's values");
  }
  return out.write_at(data, block.of.tensor->begin + range.begin);
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
  const std::size_t pieces = divide_up(out.size(), kReadBytes);
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

std::span<std::byte> Delta::payload_of(const DeltaBlock& block) const {
  return {bytes_.get() + block.begin, block.bytes};
}

Result<> Delta::apply(Context& context, std::span<const std::span<std::byte>> targets) {
  const std::vector<Tensor> all = tensors();
  if (targets.size() != all.size()) {
    return format_error(Errc::invalid_argument, "there are " + std::to_string(targets.size()) +
                                                    " targets for " + std::to_string(all.size()) +
                                                    " tensors");
  }
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
  // the processor's caches. They exchange their elements with the delta, so that a second exchange
  // restores both.
  std::vector<char> is_changed(blocks.size());
  const auto exchange = [&](std::size_t i) {
    const Block& block = blocks[i];
    const auto payload = payload_of(block.change());
    const auto elements = format::sparse_elements(payload, block.item_bytes());
    format::exchange_elements(payload, payload.last(elements.size()), target_of(block),
                              block.item_bytes());
  };
  auto changed = run_parallel(context, blocks.size(), "apply_delta", [&](std::size_t i) {
    const Block& block = blocks[i];
    auto checked = check_payload(block, payload_of(block.change()));
    if (checked) checked = check_base(block, target_of(block), base());
    if (!checked || block.change().change != BlockChange::sparse) return checked;
    exchange(i);
    is_changed[i] = 1;
    return checked;
  });
  if (!changed) {
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      if (is_changed[i] != 0) exchange(i);
    }
    return changed;
  }
  const auto copy_full_block = [&](std::size_t i) -> Result<> {
    const Block& block = blocks[i];
    if (block.change().change != BlockChange::full) return {};
    format::apply_change(BlockChange::full, payload_of(block.change()), target_of(block),
                         block.item_bytes());
    return {};
  };
  if (!run_parallel(context, blocks.size(), "apply_delta", copy_full_block)) {
    // The threads could not be started. Copying a block again changes nothing.
    for (std::size_t i = 0; i < blocks.size(); ++i) static_cast<void>(copy_full_block(i));
  }
  return {};
}

Result<> Delta::write_files(Context& context, const os::Directory& base,
                            const os::Directory& to) const {
  const auto from = StoredModel::open(base);
  if (!from) return from.error();
  const std::vector<Tensor> all = tensors();
  std::vector<Block> blocks = blocks_of(all);
  std::vector<const StoredTensor*> sources;  // by tensor; nullptr if the base lacks it
  for (const Tensor& tensor : all) {
    const StoredTensor* source = (*from)->find(tensor.tensor->name);
    if (!tensor.change->is_in_base) source = nullptr;
    const bool is_missing = source == nullptr || !are_identical(*source->tensor, *tensor.tensor);
    if (tensor.change->is_in_base && is_missing) {
      return in_tensor(Errc::wrong_base, tensor.tensor->name,
                       base.path() + " does not contain the tensor that the base (" + this->base() +
                           ") has; apply the delta to its base");
    }
    sources.push_back(source);
  }
  for (const Block& block : blocks) {
    const StoredTensor* source = sources[block.tensor];
    if (source != nullptr) source->files->expect_unit(source->file);
  }
  std::span<const Block> left = blocks;
  std::size_t tensors_before = 0;
  for (const format::DeltaFile& file : contents_.files) {
    if (!file.has_tensors) continue;
    tensors_before += file.tensors.size();
    const auto end = std::ranges::find_if(
        left, [&](const Block& block) { return block.tensor >= tensors_before; });
    const auto of_file = left.first(static_cast<std::size_t>(end - left.begin()));
    left = left.subspan(of_file.size());
    auto created = to.create(file.name, os::IoMode::buffered);
    if (!created) return created.error();
    auto done = created->write_at(std::as_bytes(std::span(file.start)), 0);
    if (done) {
      done = run_parallel(context, of_file.size(), "apply_delta", [&](std::size_t i) {
        const Block& block = of_file[i];
        return write_block(block, payload_of(block.change()), sources[block.tensor], this->base(),
                           *created);
      });
    }
    if (done) done = std::move(*created).close();
    if (!done) return done;
  }
  return {};
}

}  // namespace torch_ckpt::engine
