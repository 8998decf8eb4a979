#include "reads.h"

#include <algorithm>
#include <utility>

#include "format/crc32.h"
#include "format/torch_record.h"

namespace torch_ckpt::test {

using engine::LoadOptions;
using engine::LoadSession;

std::size_t Reads::add_file(const std::vector<std::string>& records) {
  std::string contents;
  for (const std::string& record : records) contents += record;
  return add_raw_file(contents);
}

std::size_t Reads::add_raw_file(std::string_view contents) {
  use_file("f" + std::to_string(files_.size()));
  write_file(directory_.file(files_.back().name), contents);
  return files_.size() - 1;
}

OwnedRead& Reads::add(engine::ReadKind kind, std::size_t file, std::uint64_t offset,
                      std::uint64_t length, const format::TensorHeader& header, std::uint64_t begin,
                      std::uint64_t bytes) {
  OwnedRead request;
  request.kind = kind;
  request.stored.file = file;
  request.stored.offset = offset;
  request.stored.length = length;
  request.stored.dtype = header.dtype;
  request.stored.sizes = header.sizes;
  request.region = planning::Region::of_bytes(begin, bytes);
  return add_to_host(std::move(request), bytes);
}

OwnedRead& Reads::add_whole(std::size_t file, std::string_view payload) {
  const auto header = row_major("uint8", {payload.size()});
  return add(engine::ReadKind::tensor, file, 0, record_of(header, payload).size(), header, 0,
             payload.size());
}

void Reads::add_small_files(std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) add_whole(add_file({byte_record("hello")}), "hello");
}

OwnedRead& Reads::add_to_host(OwnedRead request, std::size_t bytes, std::size_t origin) {
  // Exactly this size, so that AddressSanitizer detects a single byte too many.
  Memory memory{std::make_unique<char[]>(bytes), bytes};
  std::fill_n(memory.memory.get(), bytes, '?');
  request.target.address = reinterpret_cast<std::byte*>(memory.memory.get() + origin);
  OwnedRead& added = add_as_it_is(std::move(request));
  targets_.back() = std::move(memory);
  return added;
}

OwnedRead& Reads::add_as_it_is(OwnedRead request) {
  OwnedRead& added = requests_.emplace_back(std::move(request));
  added.record = &added.stored;
  added.stored.name = std::to_string(count() - 1);
  targets_.emplace_back();
  return added;
}

std::uint64_t Reads::bytes() const {
  std::uint64_t sum = 0;
  for (const OwnedRead& request : requests_) sum += request.region.bytes();
  return sum;
}

std::shared_ptr<LoadSession> Reads::start(const LoadOptions& options) const {
  return start_in(open_directory(directory_), options);
}

std::shared_ptr<LoadSession> Reads::start_in(engine::Folder folder,
                                             const LoadOptions& options) const {
  auto session = LoadSession::start(context(), std::move(folder), files_,
                                    {requests_.begin(), requests_.end()}, options);
  EXPECT_TRUE(ok(session));
  return *session;
}

std::shared_ptr<LoadSession> Reads::run(const LoadOptions& options) const {
  auto session = start(options);
  wait_for_end(*session);
  return session;
}

void Reads::run_all(const LoadOptions& options) const {
  const auto session = run(options);
  const auto failure = session->failure();
  ASSERT_FALSE(failure.has_value()) << failure->message();
  for (const engine::ReadOutcome& outcome : session->outcomes()) {
    ASSERT_EQ(outcome.status, engine::ReadStatus::done);
  }
  EXPECT_EQ(session->bytes_planned(), bytes());
  EXPECT_EQ(session->bytes_done(), bytes());
}

::testing::AssertionResult failed(const LoadSession& session, Errc code, std::size_t request) {
  return failed(session, code, std::to_string(request));
}

::testing::AssertionResult failed(const LoadSession& session, Errc code, std::string_view subject) {
  const auto failure = session.failure();
  if (!failure) return ::testing::AssertionFailure() << "succeeded";
  if (failure->code == code && failure->subject == subject) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << failure->code << ": " << failure->message();
}

planning::StoredRecord Stored::described() const {
  planning::StoredRecord described;
  described.offset = offset();
  described.length = record.size();
  described.is_tensor = !sums.raw;
  described.dtype = header.dtype;
  described.sizes = header.sizes;
  return described;
}

OwnedRead Stored::request(engine::ReadKind kind) const {
  OwnedRead request;
  request.kind = kind;
  request.stored.offset = offset();
  request.stored.length = record.size();
  request.stored.dtype = header.dtype;
  request.stored.sizes = header.sizes;
  return request;
}

namespace {

void sum_blocks(Stored& stored, std::uint64_t block_bytes) {
  const std::uint64_t bytes = stored.payload.size();
  if (bytes == 0) return;
  const std::uint64_t block = block_bytes != 0 ? block_bytes : format::block_bytes_for(bytes);
  stored.sums.block_bytes = block;
  for (std::uint64_t at = 0; at < bytes; at += block) {
    const auto part = bytes_of(stored.payload).subspan(at, std::min(block, bytes - at));
    stored.sums.block_crcs.push_back(format::crc32(0, part));
  }
}

}  // namespace

Stored store(const format::TensorHeader& header, std::string payload, std::uint64_t offset,
             std::uint64_t block_bytes) {
  Stored stored;
  stored.header = header;
  stored.payload = std::move(payload);
  stored.record = record_of(header, stored.payload);
  const std::string pickle = format::encode_tensor_pickle(header);
  stored.payload_at = format::RecordTemplate(pickle, stored.payload.size()).head().size();
  stored.sums.offset = offset;
  std::string envelope = stored.record;
  envelope.erase(stored.payload_at, stored.payload.size());
  stored.sums.envelope_crc = format::crc32(0, bytes_of(envelope));
  sum_blocks(stored, block_bytes);
  return stored;
}

Stored store_raw(std::string bytes, std::uint64_t offset, std::uint64_t block_bytes) {
  Stored stored;
  stored.record = bytes;
  stored.payload = std::move(bytes);
  stored.sums.offset = offset;
  stored.sums.raw = true;
  sum_blocks(stored, block_bytes);
  return stored;
}

void widen(std::byte* out, const std::byte* in, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t b = 0; b < 4; ++b) {
      out[4 * i + b] = b < 2 ? in[2 * i + b] : ~in[2 * i + b - 2];
    }
  }
}

std::string widened(std::string_view items) {
  std::string out(2 * items.size(), '?');
  widen(reinterpret_cast<std::byte*>(out.data()), bytes_of(items).data(), items.size() / 2);
  return out;
}

std::string unknown_record(std::string_view payload) {
  std::string pickle = format::encode_tensor_pickle(row_major("uint8", {payload.size()}));
  pickle.replace(pickle.find("_rebuild_tensor_v2"), 18, "_rebuild_qtensor__");
  const format::RecordTemplate record(pickle, payload.size());
  return record.head() + std::string(payload) + record.encode_tail(0);
}

}  // namespace torch_ckpt::test
