#include "engine/checkpoint_verification.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <tuple>
#include <utility>

#include "engine/record_reader.h"
#include "format/dtype.h"
#include "index/extents.h"
#include "planning/tiling.h"

namespace torch_ckpt::engine {
namespace {

using index::CheckpointIndex;
using Kind = CheckpointFault::Kind;

constexpr std::array kFileDamage = {ENOENT, ENOTDIR,   EISDIR,  ENXIO,   ELOOP,  ENAMETOOLONG,
                                    EIO,    EREMOTEIO, ENODATA, EBADMSG, EUCLEAN};

Kind kind_of(const Error& error) {
  return error.sys_errno != 0 && !is_file_damage(error.sys_errno) ? Kind::unread : Kind::damaged;
}

}  // namespace

bool is_file_damage(int sys_errno) { return std::ranges::count(kFileDamage, sys_errno) > 0; }

Result<> CheckpointVerification::add(const CheckpointIndex& index,
                                     const InterruptCheck& check_interrupt) {
  is_bare_ = index.is_bare();
  for (std::size_t i = 0; i < index.files().size(); ++i) {
    if (const auto table = index.text(index.tables()[i]); !table.empty()) {
      tables_[std::string(index.text(index.files()[i]))] = table;
    }
  }
  for (std::uint32_t number = 0; number < index.entries().size(); ++number) {
    TC_TRY(add_entry(index, number));
    const auto coverage = planning::check_coverage(index, number, check_interrupt);
    if (!coverage) return coverage.error();
    if (coverage->state != planning::Coverage::State::complete) {
      add_incomplete(index.name(number),
                     planning::describe(*coverage, index.entries()[number].shard_count));
    }
  }
  for (const CheckpointIndex::UndescribedRecord& record : index.undescribed_records()) {
    auto added = add_record(index, index.text(record.name), record.shard, nullptr);
    if (!added) return added;
  }
  return {};
}

Result<> CheckpointVerification::add_entry(const CheckpointIndex& index, std::uint32_t number) {
  const CheckpointIndex::Entry& entry = index.entries()[number];
  // Empty shards may share one record.
  std::map<std::tuple<std::uint32_t, std::uint64_t, std::uint64_t>, CheckpointIndex::Shard> records;
  for (const CheckpointIndex::Shard& shard : index.shards(entry)) {
    if (shard.file != CheckpointIndex::kNone) {
      records.insert_or_assign({shard.file, shard.offset, shard.length}, shard);
    } else if (entry.is_tensor) {
      add_incomplete(index.name(number), "the metadata gives no location for the shard at offset " +
                                             index::listed(index.extents(shard.offsets)));
    } else {
      add_incomplete(index.name(number), "the metadata gives no location for it");
    }
  }
  for (const auto& [location, shard] : records) {
    auto added = add_record(index, index.name(number), shard, entry.is_tensor ? &entry : nullptr);
    if (!added) return added;
  }
  return {};
}

Result<> CheckpointVerification::add_record(const CheckpointIndex& index, std::string_view name,
                                            const CheckpointIndex::Shard& shard,
                                            const CheckpointIndex::Entry* entry) {
  const std::string file_name(index.text(index.files()[shard.file]));
  const auto [found, is_new] = files_.try_emplace(file_name);
  File& file = found->second;
  if (is_new) {
    auto opened = open(file_name);
    if (!opened) return opened.error();
    file = *opened;
  }
  file.end = std::max(file.end, shard.offset + shard.length);
  if (!file.bytes) {
    if (const auto missing = missing_.find(file_name); missing != missing_.end()) {
      missing->second.emplace_back(name);
    }
    return {};
  }
  if (shard.length > *file.bytes - std::min(shard.offset, *file.bytes)) {
    faults_.push_back({Kind::damaged, std::string(name), file_name, shard.offset, 0,
                       "the record has " + std::to_string(shard.length) +
                           " bytes, but the file ends at byte " + std::to_string(*file.bytes)});
    return {};
  }
  if (!file.number) {
    file.number = opened_.size();
    opened_.push_back(file_name);
  }
  planning::StoredRecord& record = records_.emplace_back();
  record.file = *file.number;
  record.offset = shard.offset;
  record.length = shard.length;
  // The dtype and shape of transformed data cannot be checked.
  record.is_tensor = entry != nullptr && !shard.is_transformed;
  if (record.is_tensor) {
    record.dtype = format::find_dtype(index.dtypes()[entry->dtype]);
    for (const std::int64_t size : index.extents(shard.sizes)) {
      record.sizes.push_back(static_cast<std::uint64_t>(size));
    }
  }
  names_.emplace_back(name);
  bytes_ += shard.length;
  return {};
}

Result<CheckpointVerification::File> CheckpointVerification::open(const std::string& name) {
  File file;
  const auto opened = DataFile::open(folder_, name, DirectIo::off);
  if (opened) {
    file.bytes = opened->bytes();
  } else if (opened.error().sys_errno == ENOENT) {
    missing_[name];
  } else if (folder_.store() != nullptr) {
    return opened.error();
  } else {
    Error error = opened.error();
    std::string what = error.message();
    if (error.sys_errno != 0) {
      error.path = {};
      error.operation += " failed";
      what = "the file cannot be opened: " + error.message();
    }
    faults_.push_back({kind_of(error), "", name, std::nullopt, 0, std::move(what)});
  }
  return file;
}

void CheckpointVerification::add_incomplete(std::string_view name, std::string what) {
  faults_.push_back({Kind::incomplete, std::string(name), "", std::nullopt, 0, std::move(what)});
}

Result<std::shared_ptr<VerifySession>> CheckpointVerification::start(Context& context,
                                                                     const VerifyOptions& options) {
  for (const auto& [name, file] : files_) {
    // No writer leaves any bytes there.
    if (!file.bytes || *file.bytes <= file.end) continue;
    faults_.push_back({Kind::damaged, "", name, file.end, *file.bytes - file.end,
                       "the file is longer than its records"});
  }
  std::vector<LoadFile> files;
  for (const std::string& name : opened_) {
    files.push_back({name, std::move(tables_[name]), is_bare_});
  }
  auto own = folder_.duplicate();
  if (!own) return own.error();
  return VerifySession::start(context, std::move(*own), std::move(files), std::move(records_),
                              options);
}

Result<> CheckpointVerification::finish(const VerifySession& session) {
  if (auto failure = session.failure()) return *failure;
  for (Finding& finding : session.findings()) {
    CheckpointFault& fault = faults_.emplace_back();
    fault.kind = kind_of(finding.error);
    if (finding.record != Finding::kWholeFile) fault.name = names_[finding.record];
    fault.file = opened_[finding.file];
    if (finding.error.offset != Error::kNoOffset) fault.offset = finding.error.offset;
    fault.bytes = finding.bytes;
    // Omit file and offset from the text, because they have their own fields.
    finding.error.path = {};
    finding.error.offset = Error::kNoOffset;
    fault.what = finding.error.message();
  }
  std::ranges::stable_sort(faults_, [](const CheckpointFault& a, const CheckpointFault& b) {
    return std::tuple(a.file, a.offset.value_or(0)) < std::tuple(b.file, b.offset.value_or(0));
  });
  for (const std::size_t record : session.unverifiable()) unverifiable_.push_back(names_[record]);
  std::ranges::sort(unverifiable_);
  unverifiable_.erase(std::unique(unverifiable_.begin(), unverifiable_.end()), unverifiable_.end());
  return {};
}

}  // namespace torch_ckpt::engine
