// Grammar of data.pkl for a plain tensor, with opcodes named as in Python's pickletools:
//
//   pickle  := PROTO 2, rebuild, MARK, storage, int(storage_offset), tuple(sizes), tuple(strides),
//              NEWFALSE, GLOBAL "collections OrderedDict", EMPTY_TUPLE, REDUCE,
//              [GLOBAL "torch <dtype>"],          only with _rebuild_tensor_v3
//              [flags], TUPLE, REDUCE, STOP
//   rebuild := GLOBAL "torch._utils _rebuild_tensor_v2" | "torch._utils _rebuild_tensor_v3"
//   storage := MARK, "storage", class, "0", "cpu", int(numel), TUPLE, BINPERSID
//   class   := GLOBAL "torch <T>Storage" | GLOBAL "torch.storage UntypedStorage"   (numel = bytes)
//   flags   := EMPTY_DICT, {"conj": True} or {"neg": True} or both
//   tuple   := EMPTY_TUPLE | ints TUPLE1..3 | MARK ints TUPLE
//
// Python's pickler memoizes each object (BINPUT n, counting up) except ints, bools and empty
// tuples.

#include "format/tensor_pickle.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "checked_math.h"
#include "format/pickle_reader.h"

namespace torch_ckpt::format {
namespace {

constexpr std::string_view kUtils = "torch._utils";
constexpr std::string_view kRebuildV2 = "_rebuild_tensor_v2";
constexpr std::string_view kRebuildV3 = "_rebuild_tensor_v3";

constexpr unsigned char kProtocol = 2;

constexpr std::size_t kMaxDims = 64;  // torch's limit

/// Returns the opcode that ends a tuple of `count` values.
unsigned char closing(bool marked, std::size_t count) {
  return marked ? op::kTuple : static_cast<unsigned char>(op::kTuple1 - 1 + count);
}

class Emitter {
 public:
  void op(unsigned char code) { put(out_, code, 1); }
  void global(std::string_view module, std::string_view name) {
    op(op::kGlobal);
    out_.append(module).append("\n").append(name).append("\n");
    memoize();
  }
  void string(std::string_view text) {
    op(op::kBinunicode);
    put(out_, text.size(), 4);
    out_ += text;
    memoize();
  }
  void integer(std::uint64_t value) {
    if (value <= 0xff) {
      op(op::kBinint1);
      put(out_, value, 1);
    } else if (value <= 0xffff) {
      op(op::kBinint2);
      put(out_, value, 2);
    } else if (value <= 0x7fffffff) {
      op(op::kBinint);
      put(out_, value, 4);
    } else {
      // LONG1: two's complement in the fewest bytes that keep the sign bit clear.
      std::size_t bytes = 4;
      while (bytes < 8 && (value >> (8 * bytes - 1)) != 0) ++bytes;
      if (bytes == 8 && (value >> 63) != 0) bytes = 9;
      op(op::kLong1);
      put(out_, bytes, 1);
      put(out_, value, bytes < 8 ? bytes : 8);
      if (bytes == 9) out_ += '\0';
    }
  }
  void tuple(const std::vector<std::uint64_t>& values) {
    if (values.empty()) return op(op::kEmptyTuple);
    if (values.size() > 3) op(op::kMark);
    for (const std::uint64_t value : values) integer(value);
    op(closing(values.size() > 3, values.size()));
    memoize();
  }
  void memoize() {
    op(op::kBinput);
    put(out_, memo_++, 1);
  }
  std::string take() { return std::move(out_); }

 private:
  std::string out_;
  std::size_t memo_ = 0;
};

class Parser {
 public:
  explicit Parser(std::span<const std::byte> bytes) : reader_(bytes) {}

  bool failed() const { return failed_; }
  void fail() { failed_ = true; }

  /// Consumes the next token if it has this opcode. Looks ahead by one token, but never past the
  /// end of a valid pickle: STOP is the last token requested.
  bool accept(unsigned char code) {
    if (!failed_ && !std::exchange(is_ahead_, true)) failed_ = !reader_.next(token_);
    if (failed_ || token_.code != code) return false;
    is_ahead_ = false;
    return true;
  }
  void expect(unsigned char code) {
    if (!accept(code)) fail();
  }
  void skip_memo() {
    if (!accept(op::kBinput)) accept(op::kLongBinput);
  }
  void expect_protocol() {
    expect(op::kProto);
    if (token_.number != kProtocol) fail();
  }
  /// Consumes a global of `module` and returns its name. Fails for a global of any other module.
  std::string_view global_of(std::string_view module) {
    expect(op::kGlobal);
    if (token_.bytes != module) fail();
    const std::string_view name = token_.name;
    skip_memo();
    return name;
  }
  void expect_global(std::string_view module, std::string_view name) {
    if (global_of(module) != name) fail();
  }
  std::string_view string() {
    expect(op::kBinunicode);
    const std::string_view text = token_.bytes;
    skip_memo();
    return text;
  }
  void expect_string(std::string_view text) {
    if (string() != text) fail();
  }
  bool accept_integer(std::uint64_t& value) {
    if (accept(op::kBinint1) || accept(op::kBinint2)) {
      value = token_.number;
    } else if (accept(op::kBinint)) {
      value = token_.number;
      if (value > 0x7fffffff) fail();  // negative
    } else if (accept(op::kLong1)) {
      value = long_integer(token_.bytes);
    } else {
      return false;
    }
    return true;
  }
  std::uint64_t integer() {
    std::uint64_t value = 0;
    if (!accept_integer(value)) fail();
    return value;
  }
  std::vector<std::uint64_t> tuple() {
    std::vector<std::uint64_t> values;
    if (accept(op::kEmptyTuple)) return values;
    const bool marked = accept(op::kMark);
    std::uint64_t value = 0;
    while (values.size() <= kMaxDims && accept_integer(value)) values.push_back(value);
    if (values.size() > kMaxDims || (!marked && (values.empty() || values.size() > 3))) fail();
    expect(closing(marked, values.size()));
    skip_memo();
    return values;
  }

 private:
  std::uint64_t long_integer(std::string_view digits) {
    const auto bytes = std::as_bytes(std::span(digits));
    if (bytes.empty() || bytes.size() > 9) {
      fail();
      return 0;
    }
    const std::uint64_t value = little_endian(bytes.first(std::min<std::size_t>(bytes.size(), 8)));
    const bool negative =
        bytes.size() < 9 ? (value >> (8 * bytes.size() - 1)) != 0 : bytes[8] != std::byte{0};
    if (negative) fail();
    return value;
  }

  PickleReader reader_;
  PickleToken token_;
  bool is_ahead_ = false;  // token_ was read but not consumed
  bool failed_ = false;
};

}  // namespace

bool TensorHeader::is_plain_row_major() const {
  if (conj || neg || storage_offset != 0) return false;
  std::uint64_t expected = 1;
  bool row_major = true;
  for (std::size_t i = sizes.size(); i-- > 0;) {
    if (sizes[i] == 0) return storage_bytes == 0;
    if (sizes[i] != 1 && strides[i] != expected) row_major = false;
    const auto product = checked_mul(expected, sizes[i]);
    if (!product) return false;
    expected = *product;
  }
  const auto bytes = checked_mul(expected, dtype->item_bytes);
  return row_major && bytes && *bytes == storage_bytes;
}

std::string encode_tensor_pickle(const TensorHeader& header) {
  const bool v3 = header.dtype->storage.empty();
  Emitter emit;
  emit.op(op::kProto);
  emit.op(kProtocol);
  emit.global(kUtils, v3 ? kRebuildV3 : kRebuildV2);
  emit.op(op::kMark);
  emit.op(op::kMark);
  emit.string("storage");
  if (v3) {
    emit.global("torch.storage", "UntypedStorage");
  } else {
    emit.global("torch", header.dtype->storage);
  }
  emit.string("0");
  emit.string("cpu");
  emit.integer(v3 ? header.storage_bytes : header.storage_bytes / header.dtype->item_bytes);
  emit.op(op::kTuple);
  emit.memoize();
  emit.op(op::kBinpersid);
  emit.integer(header.storage_offset);
  emit.tuple(header.sizes);
  emit.tuple(header.strides);
  emit.op(op::kNewfalse);
  emit.global("collections", "OrderedDict");
  emit.op(op::kEmptyTuple);
  emit.op(op::kReduce);
  emit.memoize();
  if (v3) emit.global("torch", header.dtype->name);
  if (header.conj || header.neg) {
    emit.op(op::kEmptyDict);
    emit.memoize();
    const bool both = header.conj && header.neg;
    if (both) emit.op(op::kMark);
    // "neg" precedes "conj", the iteration order of torch's unordered_map.
    if (header.neg) {
      emit.string("neg");
      emit.op(op::kNewtrue);
    }
    if (header.conj) {
      emit.string("conj");
      emit.op(op::kNewtrue);
    }
    emit.op(both ? op::kSetitems : op::kSetitem);
  }
  emit.op(op::kTuple);
  emit.memoize();
  emit.op(op::kReduce);
  emit.memoize();
  emit.op(op::kStop);
  return emit.take();
}

Result<TensorHeader> decode_tensor_pickle(std::span<const std::byte> bytes) {
  TensorHeader header;
  Parser parse(bytes);
  parse.expect_protocol();
  const std::string_view rebuild = parse.global_of(kUtils);
  const bool v3 = rebuild == kRebuildV3;
  if (!v3 && rebuild != kRebuildV2) parse.fail();
  parse.expect(op::kMark);
  parse.expect(op::kMark);
  parse.expect_string("storage");
  if (v3) {
    parse.expect_global("torch.storage", "UntypedStorage");
  } else {
    header.dtype = find_dtype_of_storage(parse.global_of("torch"));
  }
  parse.expect_string("0");
  parse.expect_string("cpu");
  const std::uint64_t numel = parse.integer();
  parse.expect(op::kTuple);
  parse.skip_memo();
  parse.expect(op::kBinpersid);
  header.storage_offset = parse.integer();
  header.sizes = parse.tuple();
  header.strides = parse.tuple();
  parse.expect(op::kNewfalse);
  parse.expect_global("collections", "OrderedDict");
  parse.expect(op::kEmptyTuple);
  parse.expect(op::kReduce);
  parse.skip_memo();
  if (v3) header.dtype = find_dtype(parse.global_of("torch"));
  if (parse.accept(op::kEmptyDict)) {
    parse.skip_memo();
    const bool both = parse.accept(op::kMark);
    for (int i = 0; i < (both ? 2 : 1); ++i) {
      const std::string_view flag = parse.string();
      if (flag == "conj") {
        header.conj = true;
      } else if (flag == "neg") {
        header.neg = true;
      } else {
        parse.fail();
      }
      parse.expect(op::kNewtrue);
    }
    parse.expect(both ? op::kSetitems : op::kSetitem);
  }
  parse.expect(op::kTuple);
  parse.skip_memo();
  parse.expect(op::kReduce);
  parse.skip_memo();
  parse.expect(op::kStop);
  if (parse.failed() || header.dtype == nullptr || header.sizes.size() != header.strides.size()) {
    return format_error(Errc::pickle_unknown, "data.pkl does not describe a plain CPU tensor");
  }
  const auto storage_bytes = checked_mul(numel, v3 ? 1 : header.dtype->item_bytes);
  if (!storage_bytes) return format_error(Errc::pickle_unknown, "the storage size overflows");
  header.storage_bytes = *storage_bytes;
  return header;
}

}  // namespace torch_ckpt::format
