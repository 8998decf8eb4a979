#include "programs.h"

#include <algorithm>
#include <bit>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "format/pickle_reader.h"

namespace torch_ckpt::test {
namespace {

namespace op = format::op;

constexpr std::string_view kMetadata = "torch.distributed.checkpoint.metadata";
constexpr std::string_view kFilesystem = "torch.distributed.checkpoint.filesystem";

/// Memo indices of values of one kind.
using Pool = std::vector<std::uint64_t>;

class ProgramWriter {
 public:
  ProgramWriter(const Choose& choose, std::size_t bytes)
      : choose_(choose),
        bytes_(bytes),
        names_(one_in(8) ? 0 : choose(0, bytes / 40)),
        shares_(choose(0, 8)),
        repeats_pairs_(one_in(2)) {}

  std::string run() {
    first_opcode();
    instance(kMetadata, "Metadata", [&] {
      if (!one_in(16)) attribute("state_dict_metadata", [&] { entries(); });
      if (one_in(3)) attribute("planner_data", [&] { paths(); });
      if (!one_in(4)) attribute("storage_data", [&] { locations(); });
      if (one_in(4)) attribute("all_local_plans", [&] { flood(); });
      if (one_in(2)) attribute("torch_ckpt", [&] { tables(); });
    });
    put(op::kStop);
    return std::move(out_);
  }

 private:
  // --- choices ---

  bool one_in(std::uint64_t count) { return choose_(1, count) == 1; }
  std::size_t left() const { return bytes_ > out_.size() ? bytes_ - out_.size() : 0; }

  // --- opcodes ---

  void put(unsigned char code) { out_ += static_cast<char>(code); }
  void number(std::uint64_t value, std::size_t bytes) {
    for (std::size_t i = 0; i < bytes; ++i) out_ += static_cast<char>((value >> (8 * i)) & 0xff);
  }
  void first_opcode() {
    if (one_in(4)) return;
    put(op::kProto);
    number(one_in(32) ? choose_(0, 255) : choose_(2, 5), 1);
  }
  void memoize(Pool& pool) {
    if (one_in(16)) return;
    if (one_in(8)) {
      put(op::kLongBinput);
      number(one_in(64) ? choose_(0, 0xffffffff) : memoized_, 4);
    } else {
      put(op::kMemoize);
    }
    pool.push_back(memoized_++);
  }
  void fetch(std::uint64_t index) {
    put(index < 256 ? op::kBinget : op::kLongBinget);
    number(index, index < 256 ? 1 : 4);
  }
  /// Fetches a value from the pool. Returns false if the caller is to write a new value.
  bool shares(const Pool& pool) {
    if (pool.empty() || (!repeats_ && choose_(0, 8) > shares_)) return false;
    fetch(repeats_ || one_in(2) ? pool.back() : pool[choose_(0, pool.size() - 1)]);
    return true;
  }
  void integer(std::uint64_t value) {
    if (value < 256 && !one_in(16)) {
      put(op::kBinint1);
      return number(value, 1);
    }
    if (value < 0x80000000 && !one_in(16)) {
      put(op::kBinint);
      return number(value, 4);
    }
    put(op::kLong1);
    const std::size_t bytes = one_in(8) ? 16 : 8;
    number(bytes, 1);
    number(value, std::min<std::size_t>(bytes, 8));
    if (bytes > 8) number(one_in(2) ? 0 : value, 8);
  }
  void text_of(std::string_view text) {
    if (text.size() < 256 && !one_in(8)) {
      put(op::kShortBinunicode);
      number(text.size(), 1);
    } else if (!one_in(8)) {
      put(op::kBinunicode);
      number(text.size(), 4);
    } else {
      put(op::kBinunicode8);
      number(text.size(), 8);
    }
    out_ += text;
  }
  void global(std::string_view module, std::string_view name) {
    const auto [known, is_new] = globals_.try_emplace({module, name}, 0);
    if (!is_new && known->second > 0) return fetch(known->second - 1);
    if (one_in(3)) {
      put(op::kGlobal);
      out_.append(module).append("\n").append(name).append("\n");
    } else {
      text_of(module);
      memoize(texts_);
      text_of(name);
      if (one_in(4)) memoize(texts_);
      put(op::kStackGlobal);
    }
    Pool made;
    memoize(made);
    known->second = made.empty() ? 0 : made.back() + 1;
  }

  // --- values ---

  /// Writes a new text. Some are long.
  void new_text(Pool& pool) {
    std::string text = std::to_string(memoized_);
    if (one_in(8)) text.append(choose_(0, std::min<std::size_t>(left() / 2, 1 << 16)), 'x');
    if (one_in(64)) text += static_cast<char>(choose_(0, 255));
    text_of(text);
    memoize(pool);
  }
  void text(Pool& pool) {
    if (!shares(!repeats_ && one_in(32) ? texts_ : pool)) new_text(pool);
  }
  template <class Items>
  void dict(Items items) {
    put(op::kEmptyDict);
    put(op::kMark);
    items();
    put(op::kSetitems);
  }
  /// Writes a pair. In half of the programs some pairs are repeated many times.
  template <class Pair>
  void pair(Pair write) {
    write();
    if (!repeats_pairs_ || !one_in(8)) return;
    const std::size_t begin = out_.size();
    const std::size_t end = begin + choose_(0, left());
    repeats_ = true;
    while (out_.size() < end) write();
    repeats_ = false;
  }
  template <class Value>
  void attribute(std::string_view name, Value value) {
    const auto [known, is_new] = attributes_.try_emplace(name, 0);
    if (!is_new && known->second > 0) {
      fetch(known->second - 1);
    } else {
      text_of(name);
      Pool made;
      memoize(made);
      known->second = made.empty() ? 0 : made.back() + 1;
    }
    value();
  }
  template <class State>
  void instance(std::string_view module, std::string_view name, State state) {
    global(module, name);
    put(op::kEmptyTuple);
    put(op::kNewobj);
    if (one_in(64)) return;
    dict(state);
    put(op::kBuild);
  }
  template <class Parts>
  void tuple(Parts parts) {
    put(op::kMark);
    parts();
    put(op::kTuple);
  }
  std::uint64_t edge() {
    const std::uint64_t edges[] = {
        0, 1, names_, 0x7fffffff, std::uint64_t{1} << 40, ~std::uint64_t{0}};
    return edges[choose_(0, std::size(edges) - 1)];
  }
  void extents(std::uint64_t value) {
    if ((repeats_ || one_in(4)) && shares(extents_)) return;
    const bool is_size = one_in(2);
    if (is_size) global("torch", "Size");
    tuple([&] { integer(one_in(64) ? edge() : value); });
    if (is_size) {
      put(op::kTuple1);
      put(op::kReduce);
    }
    memoize(extents_);
  }
  void chunk(std::uint64_t offset, std::uint64_t size) {
    if ((repeats_ || one_in(4)) && shares(chunks_)) return;
    instance(kMetadata, "ChunkStorageMetadata", [&] {
      attribute("offsets", [&] { extents(offset); });
      attribute("sizes", [&] { extents(size); });
    });
    memoize(chunks_);
  }
  void properties() {
    if (shares(properties_)) return;
    global(kMetadata, "TensorProperties");
    put(op::kEmptyTuple);
    put(op::kNewobj);
    tuple([&] {
      global("torch", "float32");
      put(op::kNone);
      put(one_in(2) ? op::kNewtrue : op::kNewfalse);
    });
    put(op::kBuild);
    memoize(properties_);
  }
  void tensor() {
    if (shares(tensors_)) return;
    const std::uint64_t count = one_in(8) ? choose_(0, left() / 20) : choose_(0, 3);
    const std::uint64_t size = one_in(4) ? 0 : 1;
    instance(kMetadata, "TensorStorageMetadata", [&] {
      attribute("properties", [&] { properties(); });
      attribute("size", [&] { extents(count * size); });
      attribute("chunks", [&] {
        put(op::kEmptyList);
        put(op::kMark);
        for (std::uint64_t i = 0; i < count && left() > 0; ++i) chunk(i * size, size);
        put(op::kAppends);
        memoize(anything_);
      });
    });
    memoize(tensors_);
  }
  void object() {
    if (shares(objects_)) return;
    global(kMetadata, "BytesStorageMetadata");
    put(op::kEmptyTuple);
    put(op::kNewobj);
    memoize(objects_);
  }
  void entries() {
    dict([&] {
      for (std::uint64_t i = 0; i < names_ && left() > 0; ++i) {
        const bool is_tensor = one_in(2);
        pair([&] {
          text(entry_names_);
          is_tensor ? tensor() : object();
        });
      }
    });
  }

  // --- locations ---

  void key() {
    if (shares(keys_)) return;
    instance(kMetadata, "MetadataIndex", [&] {
      attribute("fqn", [&] { one_in(3) ? text(texts_) : text(entry_names_); });
      attribute("offset", [&] {
        if (one_in(2)) return extents(choose_(0, 3));
        put(op::kNone);
      });
      attribute("index", [&] { put(op::kNone); });
    });
    memoize(keys_);
  }
  void location() {
    if (shares(locations_)) return;
    instance(kFilesystem, "_StorageInfo", [&] {
      attribute("relative_path", [&] { text(files_); });
      attribute("offset", [&] { integer(one_in(32) ? edge() : 100 * memoized_); });
      attribute("length", [&] { integer(one_in(32) ? edge() : choose_(0, 100)); });
      if (one_in(8)) {
        attribute("transform_descriptors", [&] {
          put(op::kEmptyList);
          put(op::kMark);
          for (std::uint64_t i = choose_(0, 66); i > 0; --i) text(texts_);
          put(op::kAppends);
          memoize(anything_);
        });
      }
    });
    memoize(locations_);
  }
  void locations() {
    dict([&] {
      const std::size_t end = left() / choose_(1, 4);
      for (std::uint64_t i = choose_(0, bytes_ / 40); i > 0 && left() > end / 8; --i) {
        pair([&] {
          key();
          location();
        });
      }
    });
  }

  // --- paths, checksum tables and other values ---

  void path_part(std::uint64_t index) {
    switch (choose_(0, 9)) {
      case 0:
        return text(texts_);
      case 1: {
        put(op::kBinfloat);
        const double values[] = {0.5, 1e3, 1e12, -1.0};
        const auto bits = std::bit_cast<std::uint64_t>(values[choose_(0, 3)]);
        for (int shift = 56; shift >= 0; shift -= 8) number(bits >> shift, 1);
        return;
      }
      case 2:
        return integer(edge());
      default:
        return integer(index);
    }
  }
  void path(std::uint64_t index) {
    if ((repeats_ || one_in(4)) && shares(paths_)) return;
    const std::uint64_t parts = one_in(32) ? choose_(0, left() / 2) : choose_(1, 3);
    const auto put_parts = [&] {
      new_text(texts_);
      for (std::uint64_t i = 0; i < parts && left() > 0; ++i) path_part(index);
    };
    if (one_in(16)) {
      put(op::kEmptyList);
      put(op::kMark);
      put_parts();
      put(op::kAppends);
    } else {
      tuple(put_parts);
    }
    memoize(paths_);
  }
  void paths() {
    // All names have the index of the last name, or each name its own index.
    const bool is_last = one_in(2);
    dict([&] {
      for (std::uint64_t i = 0; i < names_ && left() > 0; ++i) {
        pair([&] {
          text(entry_names_);
          path(is_last ? names_ - 1 : i);
        });
      }
    });
  }
  void table() {
    if (shares(tables_)) return;
    const std::string bytes(one_in(4) ? choose_(0, left()) : choose_(0, 100), 't');
    put(op::kBinbytes);
    number(bytes.size(), 4);
    out_ += bytes;
    memoize(tables_);
  }
  void tables() {
    dict([&] {
      attribute("version", [&] { integer(one_in(16) ? 2 : 1); });
      attribute("checksums", [&] {
        dict([&] {
          for (std::uint64_t i = choose_(0, bytes_ / 40); i > 0 && left() > 0; --i) {
            pair([&] {
              text(files_);
              table();
            });
          }
        });
      });
      if (one_in(4)) attribute("phases", [&] { text(texts_); });
    });
  }
  /// Writes a list of one value, repeated as often as it may fit.
  void flood() {
    static constexpr std::string_view kValues[] = {
        "N", "}", "]", ")", "N\x85", "K\1", "\x8c\1x", "N\x94", "]\x94", "}\x94", ")\x85\x85", "(t",
    };
    const std::string_view value = kValues[choose_(0, std::size(kValues) - 1)];
    const bool is_call = one_in(8);
    put(op::kEmptyList);
    put(op::kMark);
    for (std::size_t count = left() / (is_call ? 8 : value.size()) / choose_(1, 3); count > 0;
         --count) {
      if (is_call) {
        global("pathlib", "PosixPath");
        text(texts_);
        put(op::kTuple1);
        put(op::kReduce);
        continue;
      }
      out_ += value;
      memoized_ += value.back() == '\x94' ? 1 : 0;
      if (count % 1024 == 0) {
        put(op::kAppends);
        put(op::kMark);
      }
    }
    put(op::kAppends);
  }

  const Choose& choose_;
  std::size_t bytes_;
  std::uint64_t names_;
  std::uint64_t shares_;  // about this many of 9 values are fetched from the memo
  bool repeats_pairs_;
  bool repeats_ = false;  // use the values of the previous pair
  std::string out_;
  std::uint64_t memoized_ = 0;
  std::map<std::pair<std::string_view, std::string_view>, std::uint64_t> globals_;
  std::map<std::string_view, std::uint64_t> attributes_;
  Pool texts_, entry_names_, files_, extents_, chunks_, properties_, tensors_, objects_, keys_,
      locations_, paths_, tables_, anything_;
};

}  // namespace

std::string metadata_program(const Choose& choose, std::size_t bytes) {
  return ProgramWriter(choose, bytes).run();
}

}  // namespace torch_ckpt::test
