#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "engine/save_layout.h"
#include "engine/save_session.h"
#include "os/directory.h"
#include "planning/safetensors_layout.h"
#include "torch/extents.h"
#include "torch/python_ref.h"
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
  friend class TensorSave;

  /// Calls `visit` with each source.
  template <class Visit>
  void for_each(const Visit& visit) const;
  void keep(const Tensor& tensor);
  [[noreturn]] void throw_misplaced(std::size_t parts) const;
  engine::SaveLayout lay_out(const engine::NamingOptions& naming);
  std::vector<engine::SharedFile> shared_files() const;

  std::vector<engine::SaveItem> items_;
  std::vector<engine::SavePart> parts_;
  planning::RankPlaces places_;  // of the parts
  // Owners of the memory. A tensor whose Python object exists is no owner: `tensor.data = ...`
  // gives it another storage.
  std::vector<PythonRef> storages_;
  std::vector<Tensor> tensors_;
  std::vector<std::shared_ptr<const void>> owners_;
};

// A running save and its sources. Times are in seconds since its start. Only release_sources() and
// the destructor need the GIL, because they release Python objects.
class TensorSave {
 public:
  /// Empties `sources`.
  TensorSave(engine::Context& context, const os::Directory& directory, SaveSources& sources,
             const engine::NamingOptions& naming, const engine::SaveOptions& options);
  /// Cancels the save and waits until it has ended, because the engine reads the sources until
  /// then.
  ~TensorSave();
  TensorSave(const TensorSave&) = delete;
  TensorSave& operator=(const TensorSave&) = delete;

  // Wait for an event of the session; see SaveSession. If the save failed, these return its error.
  // `seconds` may be infinite.
  Result<bool> wait(double seconds);
  Result<bool> wait_staged(double seconds);
  Result<bool> wait_submitted(double seconds);

  Result<> make_stream_wait(int device, std::uintptr_t stream);
  void release_sources() { sources_.clear(); }
  void cancel() { session_->cancel(); }

  double elapsed() const;
  /// Returns seconds until staged, seconds until ended, and the thread seconds spent on staging,
  /// checksums, writes and fsyncs.
  std::tuple<double, double, double, double, double, double> timing() const;
  /// Returns activity, file number, begin and end of each interval of work.
  std::vector<std::tuple<const char*, std::size_t, double, double>> trace() const;
  /// Returns bytes planned, staged and written, and files planned and done.
  std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t> progress()
      const;
  /// Returns name, phase, bytes written and total bytes of each unfinished file.
  std::vector<std::tuple<std::string, const char*, std::uint64_t, std::uint64_t>> unfinished()
      const;
  Result<std::vector<format::FileResult>> results() const { return session_->results(); }
  const std::vector<std::string>& file_names() const { return file_names_; }

 private:
  using Event = bool (engine::SaveSession::*)(std::chrono::milliseconds);
  Result<bool> wait_by(Event event, double seconds);

  SaveSources sources_;
  std::vector<std::string> file_names_;
  std::shared_ptr<engine::SaveSession> session_;
};

}  // namespace torch_ckpt::tensors
