#include "engine/save_session.h"

#include <algorithm>
#include <boost/asio/bind_executor.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <cstring>
#include <deque>
#include <exception>
#include <utility>

#include "checked_math.h"
#include "engine/delivery.h"
#include "format/checksum_table.h"

namespace torch_ckpt::engine {
namespace {

namespace asio = boost::asio;

// Writes in flight per file: one on the device while the next one is queued behind it.
constexpr std::size_t kDepth = 2;
// Below this a file is a handful of blocks, and the page cache is as fast as going around it.
constexpr std::uint64_t kDirectMinBytes = std::uint64_t{1} << 20;
// How long a write that waits for its turn may not notice that the save was cancelled.
constexpr std::chrono::milliseconds kCancelPoll{100};

std::size_t chunk_count(const FileImage& image, std::size_t chunk_bytes) {
  return (image.bytes() + chunk_bytes - 1) / chunk_bytes;
}

Error cancelled_error() { return format_error(Errc::cancelled, "the save was cancelled"); }

// Channels have room for all that may be sent: whoever waits for a message that is refused would
// wait for ever.
template <class Channel, class T>
void send(Channel& channel, T message) noexcept {
  if (!channel.try_send(boost::system::error_code(), std::move(message))) std::terminate();
}

// What `work` fails with, be it by an exception.
template <class Work>
std::shared_ptr<const Error> failure_of(const Work& work) noexcept {
  try {
    const Result<> done = work();
    return done ? nullptr : std::make_shared<const Error>(done.error());
  } catch (...) {
    return std::make_shared<const Error>(exception_error(std::current_exception(), "save"));
  }
}

// The message of what has been posted and uses what the coroutine holds, so that this must not go
// on without it.
template <class Channel>
asio::awaitable<std::shared_ptr<const Error>> receive(Channel& channel) noexcept {
  try {
#ifdef __clang_analyzer__  // It takes the frames of Asio's coroutines for undefined memory.
    co_return nullptr;
#else
    co_return co_await channel.async_receive(asio::use_awaitable);
#endif
  } catch (...) {
    std::terminate();
  }
}

}  // namespace

Result<std::shared_ptr<SaveSession>> SaveSession::start(os::Directory directory,
                                                        std::vector<FileJob> files,
                                                        const SaveOptions& given) {
  SaveOptions options = given;
  if (options.chunk_bytes == 0 || options.chunk_bytes % os::kDirectAlignment != 0) {
    return format_error(Errc::invalid_argument, "chunk_bytes must be a multiple of " +
                                                    std::to_string(os::kDirectAlignment));
  }
  const std::size_t count = std::max<std::size_t>(files.size(), 1);
  if (options.parallel_files == 0 || options.parallel_files > count) options.parallel_files = count;
  std::uint64_t largest = 1;
  for (const FileJob& job : files) largest = std::max(largest, job.image.bytes());
  options.chunk_bytes = static_cast<std::size_t>(
      std::min<std::uint64_t>(options.chunk_bytes, align_up(largest, os::kDirectAlignment)));
  // More a save cannot use: of each file one is filled while kDepth are written.
  std::size_t most_chunks = 0;
  for (const FileJob& job : files) most_chunks += chunk_count(job.image, options.chunk_bytes);
  if (!options.snapshot) most_chunks = std::min(most_chunks, (kDepth + 1) * options.parallel_files);
  most_chunks = std::max<std::size_t>(most_chunks, 1);
  if (options.max_host_bytes == 0) {
    options.max_host_bytes = options.chunk_bytes * most_chunks;
  } else {
    // What an earlier save with a larger budget left must not come on top of this one's.
    staging::ChunkPool::instance().trim_to_budget(options.max_host_bytes);
  }
  // A budget below one chunk gets one smaller chunk.
  options.chunk_bytes =
      std::min(options.chunk_bytes,
               static_cast<std::size_t>(align_down(options.max_host_bytes, os::kDirectAlignment)));
  if (options.chunk_bytes == 0) {
    return format_error(Errc::invalid_argument,
                        "max_host_bytes must be at least " + std::to_string(os::kDirectAlignment) +
                            ", got " + std::to_string(given.max_host_bytes));
  }
  const std::size_t chunks = std::min(options.max_host_bytes / options.chunk_bytes, most_chunks);
  options.keep_host_bytes = given.max_host_bytes;
  for (const Threads& threads : {options.stagers, options.writers}) {
    if (auto there = need_threads(threads, options.parallel_files); !there) return there.error();
  }
  std::shared_ptr<SaveSession> session(
      new SaveSession(std::move(directory), std::move(files), options, chunks));
  session->spawn_runners();
  return session;
}

// Room for every message that the file may get, so that none can be refused.
SaveSession::FileState::FileState(FileJob given, std::size_t at, const SaveOptions& options,
                                  std::size_t messages)
    : job(std::move(given)),
      number(at),
      stream(job.image, options.snapshot, options.ready),
      filled(executor(options.stagers), messages) {}

SaveSession::SaveSession(os::Directory directory, std::vector<FileJob> files,
                         const SaveOptions& options, std::size_t chunks)
    : directory_(std::move(directory)),
      options_(options),
      stagers_(executor(options.stagers)),
      writers_(executor(options.writers)),
      chunks_(chunks),
      free_slots_(stagers_, chunks),
      submitted_(files.size()),
      staged_(files.size()),
      results_(files.size()),
      timing_(options.trace),
      throttle_(options.max_bytes_per_second) {
  for (FileJob& job : files) {
    bytes_planned_ += job.image.bytes();
    const std::size_t messages = chunk_count(job.image, options.chunk_bytes) + 1;
    if (device_ == staging::Source::kHost) device_ = job.image.device();
    files_.push_back(
        std::make_unique<FileState>(std::move(job), files_.size(), options_, messages));
  }
  for (std::size_t slot = 0; slot < chunks; ++slot) {
    chunks_[slot] = staging::ChunkPool::instance().take_kept(options.chunk_bytes);
    if (chunks_[slot] != nullptr) {
      release(slot);
    } else {
      empty_slots_.push_back(slot);
    }
  }
}

void SaveSession::spawn_runners() noexcept {
  to_stage_ = running_ = files_.size();
  if (!files_.empty()) writers_needed_.emplace(writers_.get_executor());
  const std::size_t at_once = std::min(options_.parallel_files, files_.size());
  for (std::size_t i = 0; i < std::min(at_once, empty_slots_.size()); ++i) {
    spawn_slot_filler(false);
  }
  for (std::size_t i = 0; i < at_once; ++i) {
    spawn_runner(&SaveSession::stage_files);
    spawn_runner(&SaveSession::write_files);
  }
}

// From within its strand, so that all that Asio keeps of a coroutine is made and unmade there: its
// counts are ordered by fences, which ThreadSanitizer does not know.
void SaveSession::spawn_runner(boost::asio::awaitable<void> (SaveSession::*run)()) {
  const auto strand = asio::make_strand(stagers_);
  asio::post(strand, [self = shared_from_this(), strand, run] {
    // The handler keeps the session alive until its last file has ended.
    asio::co_spawn(strand, ((*self).*run)(), [self](const std::exception_ptr& exception) {
      // It has left files without their results.
      if (exception) std::terminate();
    });
  });
}

void SaveSession::release(std::size_t slot) noexcept { send(free_slots_, slot); }

// Beside the stagers, which take the first chunk that is free: making memory may be slower than the
// disk is in giving some back. What staging did not wait for is made for the next save, quietly.
void SaveSession::fill_slots(bool quiet) noexcept {
  for (std::size_t n = next_empty_++; n < empty_slots_.size(); n = next_empty_++) {
    // Also of a cancelled save, and then without memory: a stager may be waiting for just this one.
    if (!cancelled_) {
      auto chunk = make_chunk();
      // Staging has had all that it needs, and the next save asks again.
      if (chunk == nullptr && to_stage_ == 0) return;
      if (!place(empty_slots_[n], chunk)) {
        // The budget is the next save's.
        if (chunk != nullptr) staging::ChunkPool::instance().discard(std::move(chunk));
        return;
      }
    }
    release(empty_slots_[n]);
    if (!quiet && to_stage_ == 0) return spawn_slot_filler(true);
  }
}

/// nullptr where there is no memory, for which the save has failed unless it needs none any more.
std::unique_ptr<staging::Chunk> SaveSession::make_chunk() {
  try {
    auto taken = staging::ChunkPool::instance().take(options_.chunk_bytes);
    if (taken) {
      // Here, where nothing waits for it but who waits for the chunk.
      if (device_ != staging::Source::kHost) pin_or_warn(**taken, device_);
      return std::move(*taken);
    }
    if (to_stage_ > 0) fail(taken.error());
  } catch (...) {
    if (to_stage_ > 0) fail(exception_error(std::current_exception(), "save"));
  }
  return nullptr;
}

/// Whether the save has not ended yet, and then has the chunk.
bool SaveSession::place(std::size_t slot, std::unique_ptr<staging::Chunk>& chunk) {
  const std::lock_guard lock(mutex_);
  if (!ended_) chunks_[slot].swap(chunk);
  return !ended_;
}

void SaveSession::spawn_slot_filler(bool quiet) {
  asio::post(quiet ? writers_ : stagers_,
             [self = shared_from_this(), quiet] { self->fill_slots(quiet); });
}

// --- stagers -----------------------------------------------------------------------------------

asio::awaitable<void> SaveSession::stage_files() {
  for (std::size_t n = next_to_stage_++; n < files_.size(); n = next_to_stage_++) {
    FileState& state = *files_[n];
    state.has_stager = true;
    try {
      co_await stage_file(state);
    } catch (...) {
      fail(exception_error(std::current_exception(), "save"));
    }
    if (!state.is_submitted) submitted_.send({});
    // The file's writer waits for it.
    send(state.filled, std::shared_ptr<Filled>());
    if (--to_stage_ == 0) timing_.staged_ns = timing_.now_ns();
    staged_.send({});
  }
}

asio::awaitable<void> SaveSession::stage_file(FileState& state) {
  const std::uint64_t bytes = state.job.image.bytes();
  // Begun, and perhaps still on their way from a device.
  std::deque<std::shared_ptr<Filled>> begun;
  const auto pass_on_oldest = [&]() noexcept {
    pass_on(state, std::move(begun.front()));
    begun.pop_front();
  };
  std::optional<std::size_t> slot;  // taken, and not begun
  try {
    for (std::uint64_t offset = 0; offset < bytes && !cancelled_;) {
      while (!begun.empty() && state.stream.has_arrived(begun.front()->piece)) pass_on_oldest();
      free_slots_.try_receive([&](auto, std::size_t free) { slot = free; });
      if (!slot && !begun.empty()) {
        pass_on_oldest();
        continue;
      }
      if (!slot) slot = co_await free_slots_.async_receive(asio::use_awaitable);
      // Room for it first: what has been begun must not be lost.
      begun.emplace_back();
      begun.back() = fill_chunk(state, *slot, offset);
      if (begun.back() == nullptr) {
        begun.pop_back();
        break;
      }
      slot.reset();
      offset += begun.back()->fresh.size();
    }
  } catch (...) {
    fail(exception_error(std::current_exception(), "save"));
  }
  if (slot) release(*slot);
  submitted_.send({});
  state.is_submitted = true;
  while (!begun.empty()) pass_on_oldest();
}

std::shared_ptr<SaveSession::Filled> SaveSession::fill_chunk(FileState& state, std::size_t slot,
                                                             std::uint64_t offset) {
  try {
    if (cancelled_) return nullptr;
    staging::Chunk& chunk = *chunks_[slot];
    if (state.job.image.device() != staging::Source::kHost) {
      pin_or_warn(chunk, state.job.image.device());
    }
    const std::span<std::byte> memory = chunk.bytes();
    const Timed timed(timing_, Activity::stage, state.number);
    auto filled = std::make_shared<Filled>();
    filled->slot = slot;
    filled->offset = offset;
    filled->fresh =
        memory.first(std::min<std::uint64_t>(memory.size(), state.job.image.bytes() - offset));
    auto piece = state.stream.begin(filled->fresh);
    if (!piece) {
      fail(piece.error());
      return nullptr;
    }
    filled->piece = std::move(*piece);
    return filled;
  } catch (...) {
    fail(exception_error(std::current_exception(), "save"));
    return nullptr;
  }
}

void SaveSession::pass_on(FileState& state, std::shared_ptr<Filled> filled) noexcept {
  // Also of a cancelled save: until they have arrived the chunk belongs to the device.
  if (auto arrived = state.stream.arrive(filled->piece); !arrived) fail(arrived.error());
  bytes_staged_ += filled->fresh.size();
  state.bytes_staged += filled->fresh.size();
  send(state.filled, std::move(filled));
}

// --- writers -----------------------------------------------------------------------------------

asio::awaitable<void> SaveSession::write_files() {
  for (std::size_t n = next_to_write_++; n < files_.size(); n = next_to_write_++) {
    FileState& state = *files_[n];
    state.has_writer = true;
    Result<> status;
    try {
      status = co_await write_file(state);
    } catch (...) {
      status = exception_error(std::current_exception(), "save");
    }
    if (!status) fail(status.error());
    // What was left gives its slots back: the file's stager, or another's, may wait for one.
    while (!state.is_drained) {
      const auto chunk = co_await state.filled.async_receive(asio::use_awaitable);
      state.is_drained = chunk == nullptr;
      if (chunk != nullptr) release(chunk->slot);
    }
    finish_file(state, std::move(status));
  }
}

// As long as somebody waits for the stagers the writers are no quieter than they are: they would
// stand back behind them, and the disk behind both.
boost::asio::io_context& SaveSession::busy_executor() {
  return to_stage_ == 0 ? writers_ : stagers_;
}

asio::awaitable<Result<>> SaveSession::write_file(FileState& state) {
  Result<os::File> file = open_file(state);
  if (!file) fail(file.error());
  // Without a file too: what has been filled gives its slots back.
  auto written = co_await write_chunks(state, file ? &*file : nullptr);
  if (!file) co_return file.error();
  if (!written) co_return written;
  // A message like that of a write, since the coroutine itself must not end off its strand: Asio
  // orders that by a fence, which ThreadSanitizer does not know.
  Channel<std::shared_ptr<const Error>> finished(co_await asio::this_coro::executor, 1);
  asio::post(busy_executor(),
             [this, self = shared_from_this(), &state, &file, &finished]() noexcept {
               send(finished, failure_of([&] { return finish_contents(state, std::move(*file)); }));
             });
  if (const auto failure = co_await receive(finished)) co_return *failure;
  co_return Result<>();
}

Result<os::File> SaveSession::open_file(FileState& state) {
  try {
    if (cancelled_) return cancelled_error();
    const std::uint64_t bytes = state.job.image.bytes();
    const bool direct = options_.direct_io == DirectIo::on ||
                        (options_.direct_io == DirectIo::automatic && bytes >= kDirectMinBytes);
    auto file =
        directory_.create(state.job.name, direct ? os::IoMode::direct : os::IoMode::buffered);
    if (!file) return file;
    state.created = true;
    auto identity = file->identity();
    if (!identity) return identity.error();
    state.identity = *identity;
    if (options_.direct_io == DirectIo::on && !file->is_direct()) {
      Error error = format_error(Errc::invalid_argument,
                                 "direct_io=True, but this file system has no direct I/O");
      error.operation = "open";
      error.path = file->path();
      return error;
    }
    if (auto reserved = file->reserve(bytes); !reserved) return reserved.error();
    return file;
  } catch (...) {
    return exception_error(std::current_exception(), "save");
  }
}

asio::awaitable<Result<>> SaveSession::write_chunks(FileState& state, os::File* file) {
  auto strand = co_await asio::this_coro::executor;
  std::optional<asio::steady_timer> timer;
  if (throttle_.limits()) timer.emplace(strand);
  // What each write in flight ends with; no error where it is null.
  Channel<std::shared_ptr<const Error>> written(strand, kDepth);
  std::size_t in_flight = 0;
  std::optional<Error> error;
  std::shared_ptr<Filled> chunk;  // whose slot is to be given back

  try {
    while (!state.is_drained) {
      chunk = co_await state.filled.async_receive(asio::use_awaitable);
      state.is_drained = chunk == nullptr;
      if (state.is_drained) break;
      if (cancelled_ || error || file == nullptr) {
        release(std::exchange(chunk, nullptr)->slot);
        continue;
      }
      co_await asio::post(asio::bind_executor(busy_executor(), asio::use_awaitable));
      {
        const Timed timed(timing_, Activity::checksum, state.number);
        state.stream.complete(chunk->piece);
      }
      if (timer) {
        const Throttle::Clock::time_point begin = throttle_.reserve(chunk->fresh.size());
        for (auto now = Throttle::Clock::now(); now < begin && !cancelled_;
             now = Throttle::Clock::now()) {
          timer->expires_at(std::min(begin, now + kCancelPoll));
          co_await timer->async_wait(asio::use_awaitable);
        }
        if (cancelled_) {
          release(std::exchange(chunk, nullptr)->slot);
          continue;
        }
      }
      start_write(state, *file, *chunk, written);
      chunk = nullptr;
      if (++in_flight == kDepth) {
        const auto failure = co_await receive(written);
        --in_flight;
        if (failure) error = *failure;
      }
    }
  } catch (...) {
    error = exception_error(std::current_exception(), "save");
  }
  if (chunk != nullptr) release(chunk->slot);
  // Also after an error: the writes use `file` and `written`.
  for (; in_flight > 0; --in_flight) {
    const auto failure = co_await receive(written);
    if (failure && !error) error = *failure;
  }
  if (error) co_return *error;
  if (cancelled_) co_return cancelled_error();
  co_return Result<>();
}

void SaveSession::start_write(FileState& state, os::File& file, const Filled& chunk,
                              Channel<std::shared_ptr<const Error>>& written) {
  const std::size_t fresh = chunk.fresh.size();
  std::span<std::byte> data = chunk.fresh;
  if (file.is_direct()) {
    // Direct writes move whole blocks; the padding is cut off once the file is complete.
    data = chunks_[chunk.slot]->bytes().first(align_up(fresh, os::kDirectAlignment));
    std::memset(data.data() + fresh, 0, data.size() - fresh);
  }
  asio::post(busy_executor(), [this, self = shared_from_this(), &state, &file, &written,
                               slot = chunk.slot, offset = chunk.offset, fresh, data]() noexcept {
    const std::int64_t begin = timing_.now_ns();
    auto failure = failure_of([&] { return file.write_at(data, offset); });
    if (failure) {
      fail(*failure);
    } else {
      bytes_written_ += fresh;
      state.bytes_written += fresh;
      if (!file.is_direct()) file.start_writeback(offset, fresh);
    }
    timing_.add(Activity::write, state.number, begin, timing_.now_ns());
    release(slot);
    send(written, std::move(failure));
  });
}

Result<> SaveSession::finish_contents(FileState& state, os::File file) {
  if (file.is_direct()) {
    if (auto cut = file.truncate(state.job.image.bytes()); !cut) return cut;
  }
  if (options_.sync) {
    const Timed timed(timing_, Activity::fsync, state.number);
    if (auto synced = file.sync(); !synced) return synced;
  }
  return std::move(file).close();
}

void SaveSession::fail(const Error& error) {
  {
    std::lock_guard lock(mutex_);
    // Too late: the files are all there, or all removed.
    if (ended_) return;
    if (!first_error_) first_error_ = error;
  }
  cancelled_ = true;
}

void SaveSession::finish_file(FileState& state, Result<> status) noexcept {
  // Before the end, which removes the files where there is no memory for a result.
  Result<format::FileResult> message = status ? result_of(state) : status.error();
  if (!message) fail(message.error());
  ++files_done_;
  if (--running_ == 0) {
    try {
      end();
    } catch (...) {
      // The result must be sent whatever happens.
      fail(exception_error(std::current_exception(), "save"));
    }
    writers_needed_.reset();
  }
  {
    // A file that has only stopped says why. So does the last one, where the directory has failed.
    const std::lock_guard lock(mutex_);
    const bool has_only_stopped = !message && message.error().code == Errc::cancelled;
    if (first_error_ && (has_only_stopped || ended_)) message = *first_error_;
  }
  state.done = true;
  if (options_.children != nullptr) options_.children->send(message, files_.size());
  results_.send(std::move(message));
}

Result<format::FileResult> SaveSession::result_of(const FileState& state) const try {
  const std::vector<ImageItem>& items = state.job.image.items();
  const std::vector<std::uint32_t>& checksums = state.stream.checksums();
  const std::vector<format::RecordSums>& sums = state.stream.sums();
  format::FileResult result;
  result.name = state.job.name;
  result.items.reserve(items.size());
  std::vector<format::RecordSums> records;
  records.reserve(items.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    const std::size_t number = state.job.items.empty() ? i : state.job.items[i];
    result.items.push_back({number, items[i].offset, items[i].bytes, checksums[i]});
    // Of nothing there is nothing to check, and it lies where the next item does.
    if (items[i].bytes > 0) records.push_back(sums[i]);
  }
  result.checksum_table = format::encode_checksum_table(records);
  return result;
} catch (...) {
  return exception_error(std::current_exception(), "save");
}

// After the last file: no stager and no write is left, since each file waited for its own.
void SaveSession::end() {
  if (!cancelled_ && options_.sync) {
    const Timed timed(timing_, Activity::fsync, 0);
    if (auto synced = directory_.sync(); !synced) fail(synced.error());
  }
  bool failed = false;
  std::vector<std::unique_ptr<staging::Chunk>> chunks;
  {
    std::lock_guard lock(mutex_);
    ended_ = true;
    failed = first_error_.has_value();
    chunks = std::move(chunks_);
  }
  if (failed) {
    for (const auto& state : files_) {
      // A file that cannot be removed is named by no metadata; the first cause is what matters.
      // One that has the name by now and is another belongs to a save that has taken over from this
      // one, while this process was stopped and given up.
      if (state->identity) {
        static_cast<void>(directory_.remove(state->job.name, *state->identity));
      } else if (state->created) {
        static_cast<void>(directory_.remove(state->job.name));
      }
    }
  }
  // Threads may hold on to the session a little longer, but not to this.
  directory_.close();
  timing_.ended_ns = timing_.now_ns();
  for (auto& chunk : chunks) {
    if (chunk != nullptr) staging::ChunkPool::instance().give_back(std::move(chunk));
  }
  if (options_.keep_host_bytes != 0) {
    staging::ChunkPool::instance().trim_to_budget(options_.keep_host_bytes);
  }
}

// --- for the caller ----------------------------------------------------------------------------

bool SaveSession::wait_staged(std::chrono::milliseconds timeout) {
  return staged_.wait_for(timeout);
}

bool SaveSession::wait_submitted(std::chrono::milliseconds timeout) {
  return submitted_.wait_for(timeout);
}

Result<> SaveSession::make_stream_wait(int device, void* stream) {
  for (const auto& state : files_) {
    const auto& copier = state->stream.copier();
    if (copier == nullptr) continue;
    if (auto held = copier->make_stream_wait(device, stream); !held) return held;
  }
  return {};
}

bool SaveSession::wait_for(std::chrono::milliseconds timeout) { return results_.wait_for(timeout); }

Result<> SaveSession::outcome() const {
  if (results_.inherited()) {
    return format_error(Errc::cancelled, "the save is that of the process that forked this one");
  }
  const std::lock_guard lock(mutex_);
  if (first_error_) return *first_error_;
  return {};
}

Result<std::vector<format::FileResult>> SaveSession::results() const {
  if (auto good = outcome(); !good) return good.error();
  std::vector<format::FileResult> results;
  results.reserve(files_.size());
  for (const auto& message : results_.messages()) results.push_back(*message);
  return results;
}

SaveProgress SaveSession::progress() const {
  return {bytes_planned_, bytes_staged_, bytes_written_, files_.size(), files_done_};
}

FilePhase SaveSession::FileState::phase() const {
  // In this order, since what is written was staged before.
  const std::uint64_t written = bytes_written;
  const std::uint64_t staged = bytes_staged;
  if (has_writer && staged > written) return FilePhase::writing;
  if (has_writer && staged == job.image.bytes()) return FilePhase::fsync;
  if (has_stager && staged < job.image.bytes()) return FilePhase::staging;
  return FilePhase::waiting;
}

std::vector<FileProgress> SaveSession::unfinished() const {
  std::vector<FileProgress> files;
  // Whose threads a forked child does not have.
  if (results_.inherited()) return files;
  for (const auto& state : files_) {
    if (state->done) continue;
    const FilePhase phase = state->phase();
    files.push_back({state->number, phase, state->bytes_written, state->job.image.bytes()});
  }
  return files;
}

void SaveSession::cancel() {
  if (!results_.inherited()) fail(cancelled_error());
}

}  // namespace torch_ckpt::engine
