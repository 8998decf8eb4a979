// data.pkl of a plain tensor, as a grammar (opcode letters as in Python's pickletools):
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
// After each object that is not a bare int, bool or empty tuple Python's pickler memoizes it
// (BINPUT n, counting up).

#include "format/tensor_pickle.h"

#include <cstring>
#include <limits>
#include <string_view>

#include "checked_math.h"

namespace torch_ckpt::format {
namespace {

constexpr std::string_view kRebuildV2 = "torch._utils\n_rebuild_tensor_v2\n";
constexpr std::string_view kRebuildV3 = "torch._utils\n_rebuild_tensor_v3\n";
constexpr std::string_view kUntypedStorage = "torch.storage\nUntypedStorage\n";
constexpr std::string_view kOrderedDict = "collections\nOrderedDict\n";

// More dimensions than torch itself supports (64) are refused before anything is allocated.
constexpr std::size_t kMaxDims = 64;

class Emitter {
 public:
  void op(char code) { out_ += code; }
  void global(std::string_view text) {
    out_ += 'c';
    out_ += text;
    memoize();
  }
  void string(std::string_view text) {
    out_ += 'X';
    little_endian(text.size(), 4);
    out_ += text;
    memoize();
  }
  void integer(std::uint64_t value) {
    if (value <= 0xff) {
      out_ += 'K';
      little_endian(value, 1);
    } else if (value <= 0xffff) {
      out_ += 'M';
      little_endian(value, 2);
    } else if (value <= 0x7fffffff) {
      out_ += 'J';
      little_endian(value, 4);
    } else {
      // LONG1: two's complement with as few bytes as keep the sign bit clear.
      std::size_t bytes = 4;
      while (bytes < 8 && (value >> (8 * bytes - 1)) != 0) ++bytes;
      if (bytes == 8 && (value >> 63) != 0) bytes = 9;
      out_ += '\x8a';
      little_endian(bytes, 1);
      little_endian(value, bytes < 8 ? bytes : 8);
      if (bytes == 9) out_ += '\0';
    }
  }
  void tuple(const std::vector<std::uint64_t>& values) {
    if (values.empty()) {
      out_ += ')';
      return;
    }
    if (values.size() > 3) out_ += '(';
    for (const std::uint64_t value : values) integer(value);
    out_ += values.size() > 3 ? 't' : static_cast<char>(0x84 + static_cast<int>(values.size()));
    memoize();
  }
  void memoize() {
    out_ += 'q';
    little_endian(memo_++, 1);
  }
  std::string take() { return std::move(out_); }

 private:
  void little_endian(std::uint64_t value, std::size_t bytes) {
    for (std::size_t i = 0; i < bytes; ++i) out_ += static_cast<char>((value >> (8 * i)) & 0xff);
  }

  std::string out_;
  std::size_t memo_ = 0;
};

class Parser {
 public:
  explicit Parser(std::span<const std::byte> bytes)
      : bytes_(reinterpret_cast<const char*>(bytes.data()), bytes.size()) {}

  bool failed() const { return failed_; }
  void fail() { failed_ = true; }

  bool accept(std::string_view expected) {
    if (failed_ || !bytes_.substr(at_).starts_with(expected)) return false;
    at_ += expected.size();
    return true;
  }
  void expect(std::string_view expected) {
    if (!accept(expected)) fail();
  }
  void skip_memo() {
    if (accept("q")) {
      take(1);
    } else if (accept("r")) {
      take(4);
    }
  }
  void expect_global(std::string_view text) {
    expect("c");
    expect(text);
    skip_memo();
  }
  void expect_string(std::string_view text) {
    expect("X");
    if (little_endian(4) != text.size()) fail();
    expect(text);
    skip_memo();
  }
  /// The rest of a line up to '\n', at most 64 characters.
  std::string_view line() {
    const auto rest = bytes_.substr(at_, 65);
    const auto end = rest.find('\n');
    if (failed_ || end == std::string_view::npos) {
      fail();
      return {};
    }
    at_ += end + 1;
    return rest.substr(0, end);
  }
  bool next_is_integer() const {
    if (failed_ || at_ >= bytes_.size()) return false;
    const char code = bytes_[at_];
    return code == 'K' || code == 'M' || code == 'J' || code == '\x8a';
  }
  std::uint64_t integer() {
    if (accept("K")) return little_endian(1);
    if (accept("M")) return little_endian(2);
    if (accept("J")) {
      const std::uint64_t value = little_endian(4);
      if (value > 0x7fffffff) fail();  // negative
      return value;
    }
    if (accept("\x8a")) {
      const std::uint64_t bytes = little_endian(1);
      if (bytes == 0 || bytes > 9) {
        fail();
        return 0;
      }
      const std::uint64_t value = little_endian(bytes < 8 ? bytes : 8);
      const bool negative = bytes < 9 ? (value >> (8 * bytes - 1)) != 0 : little_endian(1) != 0;
      if (negative) fail();
      return value;
    }
    fail();
    return 0;
  }
  std::vector<std::uint64_t> tuple() {
    std::vector<std::uint64_t> values;
    if (accept(")")) return values;
    const bool marked = accept("(");
    while (next_is_integer() && values.size() <= kMaxDims) values.push_back(integer());
    if (values.size() > kMaxDims) fail();
    if (marked) {
      expect("t");
    } else if (values.empty() || values.size() > 3) {
      fail();
    } else {
      const char close = static_cast<char>(0x84 + static_cast<int>(values.size()));
      expect({&close, 1});
    }
    skip_memo();
    return values;
  }

 private:
  std::uint64_t little_endian(std::uint64_t count) {
    const std::string_view raw = take(count);
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < raw.size(); ++i) {
      value |= static_cast<std::uint64_t>(static_cast<unsigned char>(raw[i])) << (8 * i);
    }
    return value;
  }
  std::string_view take(std::uint64_t count) {
    if (failed_ || !inside(at_, count, bytes_.size())) {
      fail();
      return {};
    }
    const auto raw = bytes_.substr(at_, count);
    at_ += count;
    return raw;
  }

  std::string_view bytes_;
  std::size_t at_ = 0;
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
  emit.op('\x80');
  emit.op('\x02');
  emit.global(v3 ? kRebuildV3 : kRebuildV2);
  emit.op('(');
  emit.op('(');
  emit.string("storage");
  if (v3) {
    emit.global(kUntypedStorage);
  } else {
    emit.global("torch\n" + std::string(header.dtype->storage) + "\n");
  }
  emit.string("0");
  emit.string("cpu");
  emit.integer(v3 ? header.storage_bytes : header.storage_bytes / header.dtype->item_bytes);
  emit.op('t');
  emit.memoize();
  emit.op('Q');
  emit.integer(header.storage_offset);
  emit.tuple(header.sizes);
  emit.tuple(header.strides);
  emit.op('\x89');
  emit.global(kOrderedDict);
  emit.op(')');
  emit.op('R');
  emit.memoize();
  if (v3) emit.global("torch\n" + std::string(header.dtype->name) + "\n");
  if (header.conj || header.neg) {
    emit.op('}');
    emit.memoize();
    const bool both = header.conj && header.neg;
    if (both) emit.op('(');
    // "neg" before "conj", as torch's unordered_map gives them out.
    if (header.neg) {
      emit.string("neg");
      emit.op('\x88');
    }
    if (header.conj) {
      emit.string("conj");
      emit.op('\x88');
    }
    emit.op(both ? 'u' : 's');
  }
  emit.op('t');
  emit.memoize();
  emit.op('R');
  emit.memoize();
  emit.op('.');
  return emit.take();
}

Result<TensorHeader> decode_tensor_pickle(std::span<const std::byte> bytes) {
  TensorHeader header;
  Parser parse(bytes);
  parse.expect("\x80\x02");
  parse.expect("c");
  const bool v3 = parse.accept(kRebuildV3);
  if (!v3) parse.expect(kRebuildV2);
  parse.skip_memo();
  parse.expect("((");
  parse.expect_string("storage");
  parse.expect("c");
  if (v3) {
    parse.expect(kUntypedStorage);
  } else {
    parse.expect("torch\n");
    header.dtype = find_dtype_of_storage(parse.line());
  }
  parse.skip_memo();
  parse.expect_string("0");
  parse.expect_string("cpu");
  const std::uint64_t numel = parse.integer();
  parse.expect("t");
  parse.skip_memo();
  parse.expect("Q");
  header.storage_offset = parse.integer();
  header.sizes = parse.tuple();
  header.strides = parse.tuple();
  parse.expect("\x89");
  parse.expect_global(kOrderedDict);
  parse.expect(")R");
  parse.skip_memo();
  if (v3) {
    parse.expect("ctorch\n");
    header.dtype = find_dtype(parse.line());
    parse.skip_memo();
  }
  if (parse.accept("}")) {
    parse.skip_memo();
    const bool both = parse.accept("(");
    for (int i = 0; i < (both ? 2 : 1) && !parse.failed(); ++i) {
      if (parse.accept(std::string_view("X\x04\0\0\0conj", 9))) {
        header.conj = true;
      } else {
        parse.expect(std::string_view("X\x03\0\0\0neg", 8));
        header.neg = true;
      }
      parse.skip_memo();
      parse.expect("\x88");
    }
    parse.expect(both ? "u" : "s");
  }
  parse.expect("t");
  parse.skip_memo();
  parse.expect("R");
  parse.skip_memo();
  parse.expect(".");
  if (parse.failed() || header.dtype == nullptr || header.sizes.size() != header.strides.size()) {
    return format_error(Errc::pickle_unknown, "data.pkl is not that of a plain CPU tensor");
  }
  const auto storage_bytes = checked_mul(numel, v3 ? 1 : header.dtype->item_bytes);
  if (!storage_bytes) return format_error(Errc::pickle_unknown, "the storage size overflows");
  header.storage_bytes = *storage_bytes;
  return header;
}

}  // namespace torch_ckpt::format
