#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/save_layout.h"
#include "engine/save_session.h"
#include "engine/store.h"
#include "format/result_frame.h"
#include "os/mutex.h"
#include "planning/safetensors_layout.h"
#include "torch/extents.h"
#include "torch/python_ref.h"
#include "torch/source_watch.h"
#include "torch/tensor.h"

namespace torch_ckpt::tensors {

/// The sources of a save and the owners of their memory. Names are needed only for a separation
/// hint. The methods that add tensors, clear() and the destructor need the GIL.
class SaveSources {
 public:
  SaveSources() = default;
  SaveSources(SaveSources&&) = default;
  SaveSources& operator=(SaveSources&&) = default;
  ~SaveSources() = default;

  void reserve(std::size_t values) { items_.reserve(values); }
  void add(std::string name, const Tensor& tensor);
  void add(std::string name, std::span<const std::byte> bytes, std::shared_ptr<const void> owner);
  /// Sets the files of the parts, and the place of each part. The save then has only parts.
  void set_places(planning::RankPlaces places) { places_ = std::move(places); }
  /// Adds this rank's part of a tensor; its place is the next one. The part begins at `offsets` in
  /// the tensor of size `sizes`. The elements are stored with dtype `stored`. Throws Failure if the
  /// part does not lie within the tensor or cannot be converted, or if it has no place. `tensor`
  /// must not be on a device if it must be converted or is not contiguous.
  void add_part(const std::string& name, const Tensor& tensor, const Extents& sizes,
                const Extents& offsets, ScalarType stored);
  /// Returns the size of all values, in bytes.
  std::uint64_t bytes() const;
  /// Returns the numbers of the CUDA devices that have tensors of the save.
  std::vector<int> devices() const;
  void clear() { *this = SaveSources(); }

 private:
  friend class Save;

  /// Calls `visit` with each source.
  template <class Visit>
  void for_each(const Visit& visit) const;
  void keep(const Tensor& tensor);
  [[noreturn]] void throw_misplaced(std::size_t parts) const;
  engine::SaveLayout lay_out(const engine::NamingOptions& naming);
  std::vector<engine::SharedFile> shared_files() const;

  using Header = std::shared_ptr<const format::TensorHeader>;
  struct ByValue {
    bool operator()(const Header& a, const Header& b) const { return *a < *b; }
  };

  std::vector<engine::SaveItem> items_;
  // The headers of the items. Most tensors of a state have one of a few headers.
  std::set<Header, ByValue> headers_;
  std::vector<engine::SavePart> parts_;
  planning::RankPlaces places_;  // of the parts
  // Owners of the memory. A tensor whose Python object exists is no owner: `tensor.data = ...`
  // gives it another storage.
  std::vector<PythonRef> storages_;
  std::vector<Tensor> tensors_;
  std::vector<std::shared_ptr<const void>> owners_;
};

// The write of one rank's files in a save.
//
//   1. The object is made when the caller requests the save. For a snapshot, it gets a watch over the
//      sources, whose contents are read later.
//   2. start() starts the engine, which copies all values into its chunks.
//   3. run() waits for the copies. Then the watch is asked for sources that were written to in the
//      meantime, and all sources are released.
//   4. run() waits until the files are written and durable, and finish() returns them.
//
// One thread calls start(), run(), cancel_and_wait() and finish(); any thread may call the other
// functions. Times are in seconds since start(). All functions need the GIL, and release it while
// they wait.
class Save {
 public:
  /// watch: nullptr if the caller changes no source before the end.
  explicit Save(std::shared_ptr<SourceWatch> watch) : watch_(std::move(watch)) {}
  /// Cancels the save and waits until it has ended, because the engine reads the sources until
  /// then.
  ~Save();
  Save(const Save&) = delete;
  Save& operator=(const Save&) = delete;

  /// Starts the engine. Empties `sources`.
  void start(engine::Context& context, const engine::Folder& folder, SaveSources& sources,
             const engine::NamingOptions& naming, const engine::SaveOptions& options);

  /// The functions that run() calls. Each may be empty.
  struct Callbacks {
    std::function<void()> on_staged;  // once, when the sources may change
    std::function<void()> on_wait;    // every `seconds` of a wait, and at its end
  };
  /// Waits for the end. Returns the names of the sources that were written to too early: then the
  /// caller must call cancel_and_wait(). Throws the error of the save.
  std::vector<std::string> run(const Callbacks& callbacks, double seconds);
  /// Cancels the save unless it has ended, and waits for its end. Returns the names of its files if
  /// they exist nevertheless.
  std::vector<std::string> cancel_and_wait();
  /// Ends the object's part in the save, which has ended or will not start. Releases all memory.
  /// Returns the files of a save that has succeeded.
  std::vector<format::FileResult> finish();

  /// Makes the save fail, unless it has ended.
  void cancel();
  /// Makes a stream of each device wait for the copies from that device. The sources may be changed
  /// afterwards by work on these streams, and by the caller if they are on the host. Returns
  /// nothing if the copies were not submitted within `seconds`; then call it again. Throws if a
  /// stream cannot wait, for example because it captures a CUDA graph.
  std::optional<bool> make_streams_wait(std::span<const std::pair<int, std::uintptr_t>> streams,
                                        double seconds);
  /// Returns seconds until staged and until ended, and the thread seconds spent on staging,
  /// checksums, writes and fsyncs. Zeros before start().
  std::array<double, 6> timing() const;
  /// Returns bytes planned, staged and written, and files planned and done.
  std::array<std::uint64_t, 5> progress() const;
  /// Returns name, phase, bytes written and total bytes of each unfinished file.
  std::vector<std::tuple<std::string, const char*, std::uint64_t, std::uint64_t>> unfinished()
      const;
  /// The names of the files of a save that has started.
  const std::vector<std::string>& file_names() const { return file_names_; }

 private:
  using Event = bool (engine::SaveSession::*)(std::chrono::milliseconds);
  void wait_until(Event event, const Callbacks& callbacks, double seconds);

  SaveSources sources_;
  std::shared_ptr<SourceWatch> watch_;
  std::optional<std::vector<std::string>> changed_;  // as found first
  std::vector<std::string> file_names_;
  std::string path_;
  std::shared_ptr<engine::SaveSession> session_;  // between start() and finish()
  bool is_cancelled_ = false;
  std::array<double, 6> timing_ = {};           // at the end
  std::array<std::uint64_t, 5> progress_ = {};  // likewise
  // The GIL guards all other members.
  os::Mutex mutex_;
  os::CondVar is_settled_;
  bool has_session_ TC_GUARDED_BY(mutex_) = false;
  bool is_finished_ TC_GUARDED_BY(mutex_) = false;
};

}  // namespace torch_ckpt::tensors
