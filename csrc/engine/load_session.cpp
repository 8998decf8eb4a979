#include "engine/load_session.h"

#include <utility>

namespace torch_ckpt::engine {

Result<std::shared_ptr<LoadSession>> LoadSession::start(Context& context, os::Directory directory,
                                                        std::vector<LoadFile> files,
                                                        std::vector<ReadRequest> requests,
                                                        const LoadOptions& given) {
  LoadOptions options = given;
  std::vector<const planning::Region*> regions;
  std::vector<const Target*> targets;
  regions.reserve(requests.size());
  targets.reserve(requests.size());
  for (const ReadRequest& request : requests) {
    regions.push_back(&request.region);
    targets.push_back(&request.target);
  }
  auto scratch = choose_scratch(options, regions, targets, "a load");
  if (!scratch) return scratch.error();
  std::shared_ptr<LoadSession> session(new LoadSession(context, std::move(directory), files,
                                                       std::move(requests), options, *scratch));
  if (auto planned = session->plan(files); !planned) return planned.error();
  if (auto started = session->pipeline_.start(session, "load"); !started) return started.error();
  return session;
}

Result<> LoadSession::plan(const std::vector<LoadFile>& files) {
  for (const ReadRequest& request : requests()) bytes_planned_ += request.region.bytes();
  if (options_.verify) {
    std::vector<std::optional<format::ChecksumTable>> tables(files.size());
    for (std::size_t file = 0; file < files.size(); ++file) {
      auto table = checksum_table_of(files[file]);
      if (!table) {
        Error error = table.error();
        error.path = pipeline_.path(file);
        return error;
      }
      tables[file] = std::move(*table);
    }
    delivery_.set_checksums(tables);
  }
  pipeline_.plan(delivery_.wanted(), bytes_planned_, delivery_.block_bytes());
  return {};
}

bool LoadSession::wait_for(std::chrono::milliseconds timeout) {
  return pipeline_.wait_for(timeout);
}

void LoadSession::cancel() {
  if (pipeline_.inherited()) return;
  pipeline_.fail({format_error(Errc::cancelled, "the load was cancelled")});
}

std::optional<LoadFailure> LoadSession::failure() const {
  if (pipeline_.inherited()) {
    return LoadFailure{format_error(
        Errc::cancelled,
        "the load belongs to the process that forked this one; wait for it in that process")};
  }
  auto failure = pipeline_.failure();
  if (!failure) return std::nullopt;
  LoadFailure load_failure{std::move(failure->error)};
  if (failure->record != ReadPipeline::kNoRecord) {
    load_failure.request = delivery_.requests_of(failure->record).front();
  }
  return load_failure;
}

}  // namespace torch_ckpt::engine
