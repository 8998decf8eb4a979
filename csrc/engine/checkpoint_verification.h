#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/store.h"
#include "engine/verify_session.h"
#include "error.h"
#include "index/checkpoint_index.h"
#include "interrupt_check.h"

namespace torch_ckpt::engine {

/// Returns true if an errno indicates a damaged file. Others, such as EMFILE, EACCES or ETIMEDOUT,
/// are due to the machine or to the reader's permissions.
bool is_file_damage(int sys_errno);

/// A fault that a verification has found.
struct CheckpointFault {
  enum class Kind {
    damaged,
    unread,      // could not be read for a reason other than damage
    incomplete,  // the metadata does not locate all of its data
  };
  Kind kind = Kind::damaged;
  std::string name;                     // the tensor or object; empty: the file itself
  std::string file;                     // empty for Kind::incomplete
  std::optional<std::uint64_t> offset;  // in the file
  std::uint64_t bytes = 0;              // number of damaged bytes from `offset`; 0: unknown
  std::string what;
};

// Verifies a checkpoint, without targets.
//
//   1. add() checks that the metadata locates every shard, that the shards cover their tensors, and
//      that no file is shorter than its records.
//   2. start() checks that no file is longer than its records, and starts a session that reads every
//      record.
//   3. finish() adds the findings of the session.
//
// A store has already repeated a request that fails, so any failure except a missing file ends the
// verification.
class CheckpointVerification {
 public:
  explicit CheckpointVerification(Folder folder) : folder_(std::move(folder)) {}

  /// All indexes that are added must be bare, or none. Fails only with the error of a store or of
  /// `check_interrupt`, which is called regularly.
  Result<> add(const index::CheckpointIndex& index, const InterruptCheck& check_interrupt);
  /// Must be called only once.
  Result<std::shared_ptr<VerifySession>> start(Context& context, const VerifyOptions& options);
  /// `session` has ended. Fails if an error has ended it early.
  Result<> finish(const VerifySession& session);

  /// True if the metadata names this file.
  bool names_file(const std::string& name) const { return files_.contains(name); }
  std::size_t records() const { return names_.size(); }
  std::uint64_t bytes() const { return bytes_; }
  const std::vector<CheckpointFault>& faults() const { return faults_; }
  /// The names that are stored in each file that does not exist.
  const std::map<std::string, std::vector<std::string>>& missing() const { return missing_; }
  /// Names of the records that contain bytes without a checksum, sorted.
  const std::vector<std::string>& unverifiable() const { return unverifiable_; }

 private:
  struct File {
    std::optional<std::uint64_t> bytes;  // nullopt if the file cannot be read
    std::uint64_t end = 0;               // of its last record
    std::optional<std::size_t> number;   // in opened_, if a record is read
  };

  Result<> add_entry(const index::CheckpointIndex& index, std::uint32_t number);
  Result<> add_record(const index::CheckpointIndex& index, std::string_view name,
                      const index::CheckpointIndex::Shard& shard,
                      const index::CheckpointIndex::Entry* entry);
  Result<File> open(const std::string& name);
  void add_incomplete(std::string_view name, std::string what);

  Folder folder_;
  std::map<std::string, File> files_;
  std::map<std::string, std::string> tables_;  // encoded checksum tables, by file name
  bool is_bare_ = false;                       // records are bare; see ReadKind::bare
  std::vector<std::string> opened_;
  std::vector<planning::StoredRecord> records_;
  std::vector<std::string> names_;  // of records_
  std::uint64_t bytes_ = 0;
  std::vector<CheckpointFault> faults_;
  std::map<std::string, std::vector<std::string>> missing_;
  std::vector<std::string> unverifiable_;
};

}  // namespace torch_ckpt::engine
