#include "engine/store.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "engine/context.h"
#include "os/mutex.h"
#include "python/bindings.h"
#include "python/gil.h"
#include "python/memory.h"
#include "python/types.h"

namespace py = pybind11;
using namespace py::literals;

namespace torch_ckpt::python {
namespace {

using engine::FilePiece;

/// A chunk to which Python objects refer. Gives the chunk back to the pool unless it is taken.
class LentChunk {
 public:
  explicit LentChunk(std::unique_ptr<staging::Chunk> chunk) : chunk_(std::move(chunk)) {}
  ~LentChunk() {
    if (chunk_ != nullptr) engine::Context::process().chunks.give_back(std::move(chunk_));
  }
  LentChunk(const LentChunk&) = delete;
  LentChunk& operator=(const LentChunk&) = delete;

  std::span<std::byte> first(std::size_t bytes) const {
    return chunk_ == nullptr ? std::span<std::byte>() : chunk_->bytes().first(bytes);
  }
  void add_user() {
    const os::MutexLock lock(mutex_);
    ++users_;
  }
  void remove_user() {
    const os::MutexLock lock(mutex_);
    if (--users_ == 0) unused_.notify_all();
  }
  /// Waits until no Python object refers to the chunk; returns false if `timeout` expires first.
  bool wait_until_unused(std::chrono::duration<double> timeout) {
    const auto deadline = std::chrono::steady_clock::now() +
                          std::chrono::duration_cast<std::chrono::nanoseconds>(timeout);
    const os::MutexLock lock(mutex_);
    while (users_ > 0) {
      if (!unused_.wait_until(mutex_, deadline)) return users_ == 0;
    }
    return true;
  }
  /// Returns the chunk, or nullptr while Python objects refer to it.
  std::unique_ptr<staging::Chunk> take() {
    const os::MutexLock lock(mutex_);
    return users_ == 0 ? std::move(chunk_) : nullptr;
  }

 private:
  std::unique_ptr<staging::Chunk> chunk_;
  os::Mutex mutex_;
  os::CondVar unused_;
  std::size_t users_ TC_GUARDED_BY(mutex_) = 0;
};

/// The bytes of a piece as a Python buffer.
class PieceBuffer {
 public:
  PieceBuffer(std::shared_ptr<LentChunk> chunk, std::size_t bytes)
      : chunk_(std::move(chunk)), bytes_(bytes) {
    chunk_->add_user();
  }
  ~PieceBuffer() { chunk_->remove_user(); }
  PieceBuffer(const PieceBuffer&) = delete;
  PieceBuffer& operator=(const PieceBuffer&) = delete;

  std::span<std::byte> bytes() const { return chunk_->first(bytes_); }

 private:
  const std::shared_ptr<LentChunk> chunk_;
  const std::size_t bytes_;
};

/// A piece as the argument of a Python function.
struct LentPiece : FilePiece {
  std::shared_ptr<LentChunk> chunk;
  std::function<bool()> is_cancelled;
};

/// Converts the current Python exception, which is not an error of this library, to an error of
/// `operation`.
Error error_of(const py::error_already_set& raised, const char* operation,
               const std::string& path) {
  const py::object& value = raised.value();
  Error error = format_error(Errc::store, py::str(value).cast<std::string>());
  if (raised.matches(PyExc_OSError)) {
    const py::object number = value.attr("errno");
    const py::object text = value.attr("strerror");
    error.code = Errc::system;
    error.sys_errno = number.is_none() ? EIO : number.cast<int>();
    if (!text.is_none()) error.detail = py::str(text).cast<std::string>();
  } else if (raised.matches(PyExc_ValueError)) {
    // The only argument that a store refuses is a name.
    error.code = Errc::outside_directory;
  } else if (!raised.matches(py::module_::import("torch_ckpt.errors").attr("CheckpointError"))) {
    error.detail = std::string(py::str(raised.type().attr("__name__"))) + ": " + error.detail;
  }
  error.operation = operation;
  error.path = path;
  return error;
}

/// A store whose functions are written in Python.
class PythonStore final : public engine::Store {
 public:
  /// files: an object with the methods that the docstring of _core.Store describes.
  PythonStore(std::string path, py::object files)
      : path_(std::move(path)), files_(std::move(files)) {}
  ~PythonStore() override {
    if (Py_IsInitialized() != 0) {
      const EnsuredGil gil;
      files_ = py::object();
    } else {
      files_.release();
    }
  }

  std::string path() const override { return path_; }

  Result<> write(const std::string& name, const FilePiece& piece,
                 std::unique_ptr<staging::Chunk>& chunk,
                 const std::function<bool()>& is_cancelled) override {
    auto lent = std::make_shared<LentChunk>(std::move(chunk));
    auto done = call("write", name, [&] {
      files_.attr("write")(text_of(name), LentPiece{{piece}, lent, is_cancelled});
      return Result<>();
    });
    chunk = lent->take();
    if (done && chunk == nullptr && piece.bytes > 0) {
      return format_error(Errc::internal, "the store still uses a chunk that it has written");
    }
    return done;
  }

  Result<std::uint64_t> size(const std::string& name) override {
    return call("open", name, [&]() -> Result<std::uint64_t> {
      return files_.attr("size")(text_of(name)).cast<std::uint64_t>();
    });
  }

  Result<engine::ReadBytes> read(const std::string& name, std::uint64_t offset,
                                 std::size_t bytes) override {
    auto read = call("read", name, [&]() -> Result<engine::ReadBytes> {
      const py::object buffer = files_.attr("read")(text_of(name), offset, bytes);
      std::shared_ptr<const Memory> memory(new Memory(buffer), [](const Memory* read_bytes) {
        const EnsuredGil gil;
        delete read_bytes;
      });
      const std::span<const std::byte> found = memory->bytes();
      if (found.size() != bytes) {
        return format_error(
            Errc::range_past_end,
            "requested " + std::to_string(bytes) + " bytes, got " + std::to_string(found.size()));
      }
      return engine::ReadBytes{found, std::move(memory)};
    });
    if (read) return read;
    Error error = std::move(read).error();
    error.path = path_of(name);
    error.offset = offset;
    return error;
  }

 private:
  /// Calls a Python function with the GIL, and converts its exceptions.
  template <class Function>
  auto call(const char* operation, const std::string& name, const Function& function)
      -> decltype(function()) {
    const EnsuredGil gil;
    return outlasting_python([&]() -> decltype(function()) {
      try {
        return function();
      } catch (const py::error_already_set& raised) {
        return error_of(raised, operation, path_of(name));
      } catch (const py::cast_error& error) {
        return format_error(Errc::internal,
                            std::string("a store returned another type: ") + error.what());
      }
    });
  }

  const std::string path_;
  py::object files_;
};

}  // namespace

void bind_store(py::module_& module) {
  py::class_<PieceBuffer, std::shared_ptr<PieceBuffer>>(module, "_PieceBuffer",
                                                        py::buffer_protocol())
      .def_buffer([](const PieceBuffer& buffer) {
        const auto bytes = buffer.bytes();
        return py::buffer_info(bytes.data(), 1, "B", 1, {bytes.size()}, {1}, true);
      });
  py::class_<LentPiece>(
      module, "FilePiece",
      "A piece of a file that the engine writes to a :class:`Store` (csrc/engine/store.h).")
      .def_readonly("file_bytes", &LentPiece::file_bytes)
      .def_readonly("offset", &LentPiece::offset)
      .def_readonly("bytes", &LentPiece::bytes)
      .def_property_readonly("is_last", &LentPiece::is_last,
                             "True if the piece is at the end of the file.")
      .def_property_readonly(
          "is_cancelled", [](const LentPiece& it) { return it.is_cancelled(); },
          "True if the save has failed or was cancelled. Then the call must end soon.")
      .def(
          "buffer",
          [](const LentPiece& it) {
            const py::object buffer = py::cast(std::make_shared<PieceBuffer>(it.chunk, it.bytes));
            PyObject* const view = PyMemoryView_FromObject(buffer.ptr());
            if (view == nullptr) throw py::error_already_set();
            return py::reinterpret_steal<py::memoryview>(view);
          },
          "The bytes. The engine uses the memory again when no buffer of the piece exists.")
      .def(
          "wait",
          [](const LentPiece& it, double seconds) {
            return it.chunk->wait_until_unused(std::chrono::duration<double>(seconds));
          },
          "seconds"_a, NoGil(),
          "Waits until no buffer of the piece exists; False if ``seconds`` have passed first.");
  py::class_<engine::Store, std::shared_ptr<engine::Store>>(
      module, "Store",
      "Files that are not in a local directory (csrc/engine/store.h).\n\n"
      "The engine calls methods of ``files`` from its threads. ``write(name, piece)`` returns when "
      "no buffer of the :class:`FilePiece` exists and, for the last piece, when the file is "
      "complete. ``size(name)`` returns the size of a file, and ``read(name, offset, bytes)`` "
      "exactly that many bytes. ``files`` must not refer to the store.")
      .def(py::init([](const Name& path, py::object files) -> std::shared_ptr<engine::Store> {
             return std::make_shared<PythonStore>(path, std::move(files));
           }),
           "path"_a, "files"_a)
      .def_property_readonly("path", text_getter(&engine::Store::path),
                             "Path or URL, for messages.");
}

}  // namespace torch_ckpt::python
