#include "engine/limited_loads.h"

#include <map>
#include <utility>

#include "checked_math.h"
#include "os/file.h"

namespace torch_ckpt::engine {
namespace {

Error about(const std::string& name, Error error) {
  error.subject = name;
  return error;
}

}  // namespace

Result<LimitedLoads> LimitedLoads::make(Context& context, const os::Directory& directory,
                                        std::vector<LoadFile> files, const LoadOptions& options,
                                        Wait wait) {
  if (options.max_scratch_bytes < kMinScratchBytes) {
    return format_error(Errc::invalid_argument, "max_inflight_bytes must be at least " +
                                                    std::to_string(kMinScratchBytes) + ", got " +
                                                    std::to_string(options.max_scratch_bytes));
  }
  return LimitedLoads(context, directory, std::move(files), options, std::move(wait));
}

Result<> LimitedLoads::check_limit(const std::string& name, std::uint64_t bytes) const {
  const std::uint64_t available = limit() - kMinScratchBytes;
  if (bytes <= available) return {};
  return about(name, format_error(Errc::invalid_argument,
                                  "reading it needs " + std::to_string(bytes) +
                                      " bytes of memory at once, but max_inflight_bytes=" +
                                      std::to_string(limit()) + " leaves only " +
                                      std::to_string(available) + ". Raise max_inflight_bytes."));
}

Result<> LimitedLoads::check_records_fit(const std::vector<ReadRequest>& records,
                                         const std::vector<std::string>& names) const {
  std::map<std::size_t, std::pair<std::string, std::uint64_t>> opened;  // path and length
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < records.size(); ++i) {
    const ReadRequest& record = records[i];
    const auto [entry, is_new] = opened.try_emplace(record.file);
    auto& [path, bytes] = entry->second;
    if (is_new) {
      const auto file = directory_->open_for_read(files_[record.file].name);
      if (!file) return about(names[i], file.error());
      const auto size = file->size();
      if (!size) return about(names[i], size.error());
      path = file->path();
      bytes = *size;
    }
    if (!inside(record.offset, record.length, bytes)) {
      Error error = format_error(Errc::range_past_end,
                                 "the metadata lists a record of " + std::to_string(record.length) +
                                     " bytes at this offset, but the file ends at byte " +
                                     std::to_string(bytes),
                                 record.offset);
      error.path = path;
      return about(names[i], std::move(error));
    }
    if (auto enough = check_limit(names[i], record.length); !enough) return enough;
    total += record.length;
    if (auto enough = check_limit(names[i], total); !enough) return enough;
  }
  return {};
}

Result<std::shared_ptr<LoadSession>> LimitedLoads::run(
    std::vector<ReadRequest> requests, const std::vector<std::string>& names,
    std::uint64_t target_bytes, std::uint64_t done_before,
    const std::vector<staging::ReadyEvent>& ready) {
  LoadOptions options = options_;
  options.ready.insert(options.ready.end(), ready.begin(), ready.end());
  options.max_scratch_bytes -= target_bytes;
  auto own = directory_->duplicate();
  if (!own) return own.error();
  auto session =
      LoadSession::start(*context_, std::move(*own), files_, std::move(requests), options);
  if (!session) return session;
  wait_(**session, done_before);
  if (auto failure = (*session)->failure()) {
    if (failure->request >= names.size()) return std::move(failure->error);
    return about(names[failure->request], std::move(failure->error));
  }
  return session;
}

}  // namespace torch_ckpt::engine
