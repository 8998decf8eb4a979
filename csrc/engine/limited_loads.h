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

// Loads from the same files, one after another, within one limit of memory: that of the targets
// which are made for a load, and scratch memory. For one thread. The context and the directory
// outlive it.
class LimitedLoads {
 public:
  /// Scratch memory that a load always takes.
  static constexpr std::uint64_t kLeastScratchBytes = std::uint64_t{64} << 10;

  /// Waits for the end of a session; where it throws, the session has ended as well.
  /// `done_before` are the bytes of earlier loads.
  using Wait = std::function<void(LoadSession& session, std::uint64_t done_before)>;

  /// The limit is `options.max_scratch_bytes`.
  static Result<LimitedLoads> make(Context& context, const os::Directory& directory,
                                   std::vector<LoadFile> files, const LoadOptions& options,
                                   Wait wait);

  std::uint64_t limit() const { return options_.max_scratch_bytes; }

  /// Errc::invalid_argument where targets of so many bytes leave no scratch memory.
  Result<> check_limit(const std::string& name, std::uint64_t bytes) const;

  /// check_limit() for raw records that are read at once. They must lie in their files: the
  /// metadata may make up a length.
  Result<> check_room(const std::vector<ReadRequest>& records,
                      const std::vector<std::string>& names) const;

  /// Reads, with targets that hold so many bytes of the limit. An error names the request that it
  /// happened to. Copies to devices also wait for `ready`, whose events outlive the call.
  Result<std::shared_ptr<LoadSession>> run(std::vector<ReadRequest> requests,
                                           const std::vector<std::string>& names,
                                           std::uint64_t held_bytes, std::uint64_t done_before,
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
