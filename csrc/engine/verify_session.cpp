#include "engine/verify_session.h"

namespace torch_ckpt::engine {

VerifySession::VerifySession(Context& context, Folder folder, const std::vector<LoadFile>& files,
                             std::vector<planning::StoredRecord> records,
                             const VerifyOptions& options, const ScratchLayout& scratch_layout)
    : is_in_store_(folder.store() != nullptr),
      verifier_(files, std::move(records),
                [this](Error error) {
                  if (is_in_store_) pipeline_.fail(std::move(error));
                }),
      pipeline_(context, std::move(folder), files, options, scratch_layout, no_devices_, verifier_,
                !is_in_store_) {}

Result<std::shared_ptr<VerifySession>> VerifySession::start(
    Context& context, Folder folder, std::vector<LoadFile> files,
    std::vector<planning::StoredRecord> records, const VerifyOptions& given) {
  VerifyOptions options = given;
  if (folder.store() != nullptr) options.chunk_bytes = kStoreChunkBytes;
  auto scratch = choose_scratch(options, {}, {}, "a verification");
  if (!scratch) return scratch.error();
  std::shared_ptr<VerifySession> session(
      new VerifySession(context, std::move(folder), files, std::move(records), options, *scratch));
  auto wanted = session->verifier_.wanted();
  for (const planning::WantedRecord& record : wanted) {
    session->bytes_planned_ += record.record->length;
  }
  session->pipeline_.plan(std::move(wanted), session->bytes_planned_,
                          session->verifier_.block_bytes());
  TC_TRY(session->pipeline_.start(session, "verify"));
  return session;
}

bool VerifySession::wait_for(std::chrono::milliseconds timeout) {
  return pipeline_.wait_for(timeout);
}

void VerifySession::cancel() {
  if (pipeline_.inherited()) return;
  pipeline_.fail(format_error(Errc::cancelled, "the verification was cancelled"));
}

std::optional<Error> VerifySession::failure() const {
  if (pipeline_.inherited()) {
    return format_error(Errc::cancelled,
                        "the verification belongs to the process that forked this one; wait for it "
                        "in that process");
  }
  return pipeline_.failure();
}

}  // namespace torch_ckpt::engine
