#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/load_session.h"
#include "error.h"
#include "os/directory.h"

namespace torch_ckpt::engine {

// Runs loads from the same files, one after another, within one memory limit. Scratch memory and
// targets allocated for a load count towards the limit. Not thread-safe. The context and the
// directory must outlive this object.
class LimitedLoads {
 public:
  /// The minimum scratch memory of a load.
  static constexpr std::uint64_t kMinScratchBytes = std::uint64_t{64} << 10;

  /// Waits until a session has ended. May throw, but only after the session has ended.
  /// `done_before` is the number of bytes read by earlier loads.
  using Wait = std::function<void(LoadSession& session, std::uint64_t done_before)>;

  /// `options.max_scratch_bytes` is the limit.
  static Result<LimitedLoads> make(Context& context, const os::Directory& directory,
                                   std::vector<LoadFile> files, const LoadOptions& options,
                                   Wait wait);

  std::uint64_t limit() const { return options_.max_scratch_bytes; }
  /// Returns the kind of the records of tensors in a file.
  ReadKind tensor_kind(std::size_t file) const {
    return files_[file].is_bare ? ReadKind::bare : ReadKind::tensor;
  }

  /// Fails with Errc::invalid_argument if targets with a total size of `bytes` leave too little
  /// scratch memory.
  Result<> check_limit(const std::string& name, std::uint64_t bytes) const;

  /// Checks that raw records that are read together fit into the limit, and that they lie inside
  /// their files. Call this before allocating memory for the records: damaged metadata may contain
  /// any length.
  Result<> check_records_fit(const std::vector<ReadRequest>& records,
                             const std::vector<std::string>& names) const;

  /// Runs one load, whose targets already use `target_bytes` of the limit. Errors name the request
  /// that failed. Copies to devices also wait for the events in `ready`, which must outlive the
  /// call.
  Result<std::shared_ptr<LoadSession>> run(std::vector<ReadRequest> requests,
                                           const std::vector<std::string>& names,
                                           std::uint64_t target_bytes, std::uint64_t done_before,
                                           const std::vector<staging::ReadyEvent>& ready = {});

 private:
  LimitedLoads(Context& context, const os::Directory& directory, std::vector<LoadFile> files,
               const LoadOptions& options, Wait wait)
      : context_(&context),
        directory_(&directory),
        files_(std::move(files)),
        options_(options),
        wait_(std::move(wait)) {}

  Context* context_;
  const os::Directory* directory_;
  std::vector<LoadFile> files_;
  LoadOptions options_;
  Wait wait_;
};

}  // namespace torch_ckpt::engine
