// Opening files beneath a directory, with and without the kernel's openat2.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "os/directory.h"
#include "os/fault.h"
#include "support.h"

namespace torch_ckpt::os {
namespace {

using namespace test;

std::string contents_of(const File& file) {
  const auto size = file.size();
  EXPECT_TRUE(ok(size));
  std::string text(*size, '?');
  EXPECT_TRUE(ok(file.read_at(std::as_writable_bytes(std::span(text)), 0)));
  return text;
}

// The parameter is the errno with which openat2 fails; 0: it works.
class Beneath : public ::testing::TestWithParam<int> {
 protected:
  Beneath()
      : without_openat2_([](std::string_view operation, std::string_view) {
          return operation == "openat2" ? GetParam() : 0;
        }) {
    std::filesystem::create_directories(directory_.file("checkpoint/below/deep"));
    write_file(checkpoint("data"), "data");
    write_file(checkpoint("below/deep/data"), "deep");
    write_file(directory_.file("secret"), "secret");
  }

  std::string directory_path() const { return directory_.file("checkpoint"); }
  std::string checkpoint(std::string_view name) const {
    return directory_.file("checkpoint/" + std::string(name));
  }

  static Result<File> open_in(const std::string& path, const std::string& name) {
    auto directory = Directory::open(path);
    EXPECT_TRUE(ok(directory));
    return directory->open_for_read(name);
  }
  Result<File> open(const std::string& name) const { return open_in(directory_path(), name); }

  void link(const std::string& to, std::string_view name) {
    std::filesystem::create_symlink(to, checkpoint(name));
  }

  /// Succeeds if opening fails with an error that has the path and the advice.
  ::testing::AssertionResult is_refused_as_link(const std::string& name) const {
    const auto file = open(name);
    if (auto refused = fails(file, Errc::outside_directory); !refused) return refused;
    if (file.error().path != checkpoint(name) ||
        file.error().detail.str().find("copy the files themselves") == std::string::npos) {
      return ::testing::AssertionFailure() << file.error().message();
    }
    return ::testing::AssertionSuccess();
  }

 private:
  TempDir directory_;
  ScopedFaultHook without_openat2_;
};

TEST_P(Beneath, AFileIsOpened) {
  const auto file = open("data");
  ASSERT_TRUE(ok(file));
  EXPECT_EQ(contents_of(*file), "data");
  EXPECT_EQ(file->path(), checkpoint("data"));
}

TEST_P(Beneath, AFileInFoldersIsOpened) {
  for (const std::string name :
       {"below/deep/data", "./below/deep/data", "below//deep/./data", "./data"}) {
    EXPECT_TRUE(ok(open(name))) << name;
  }
}

TEST_P(Beneath, DirectReadsGiveTheSameBytes) {
  auto directory = Directory::open(directory_path());
  ASSERT_TRUE(ok(directory));
  const auto file = directory->open_for_read("data", IoMode::direct);
  ASSERT_TRUE(ok(file));
  alignas(4096) static std::byte block[4096];
  const auto got = file->read_some_at(block, 0);
  ASSERT_TRUE(ok(got));
  EXPECT_EQ(test::text_of(std::span(block).first(*got)), "data");
}

TEST_P(Beneath, NamesThatCouldLeadOutOfTheDirectoryAreRefused) {
  const std::vector<std::string> names = {"",
                                          "/etc/passwd",
                                          "../secret",
                                          "..",
                                          ".",
                                          "./",
                                          "below/",
                                          "below/.",
                                          "below/..",
                                          "below/../data",
                                          "below\\x",
                                          "data\\..\\..",
                                          std::string("da\0ta", 5)};
  for (const std::string& name : names) {
    EXPECT_TRUE(fails(open(name), Errc::outside_directory)) << "'" << name << "'";
  }
}

TEST_P(Beneath, DotsWithinANameAreAllowed) {
  for (const std::string name : {"..data", "data..", "..."}) {
    write_file(checkpoint(name), "dots");
    EXPECT_TRUE(ok(open(name))) << name;
  }
}

TEST_P(Beneath, ALinkToAFileIsRefused) {
  link("data", "inside");
  link("../secret", "outside");
  link("/etc/passwd", "absolute");
  link("nowhere", "dangling");
  for (const std::string name : {"inside", "outside", "absolute", "dangling"}) {
    EXPECT_TRUE(is_refused_as_link(name)) << name;
  }
}

TEST_P(Beneath, ALinkToAFolderIsRefused) {
  link("below", "inside");
  link("..", "outside");
  EXPECT_TRUE(is_refused_as_link("inside/deep/data"));
  EXPECT_TRUE(is_refused_as_link("outside/secret"));
}

TEST_P(Beneath, AMagicLinkOfProcIsRefused) {
  EXPECT_TRUE(fails(open_in("/proc/self", "exe"), Errc::outside_directory));
  EXPECT_TRUE(fails(open_in("/proc/self", "cwd/secret"), Errc::outside_directory));
  EXPECT_TRUE(fails(open_in("/proc/self", "fd/0"), Errc::outside_directory));
}

TEST_P(Beneath, AFifoIsRefusedWithoutWaiting) {
  ASSERT_EQ(::mkfifo(checkpoint("pipe").c_str(), 0600), 0);
  const auto file = open("pipe");
  ASSERT_TRUE(fails(file, Errc::invalid_argument));
  EXPECT_EQ(file.error().message(), "open " + checkpoint("pipe") + ": not a regular file");
}

TEST_P(Beneath, ADirectoryIsRefused) { EXPECT_TRUE(fails(open("below"), Errc::invalid_argument)); }

TEST_P(Beneath, ADeviceIsRefused) {
  EXPECT_TRUE(fails(open_in("/dev", "zero"), Errc::invalid_argument));
}

TEST_P(Beneath, AMissingFileIsASystemErrorWithItsPath) {
  for (const std::string name : {"gone", "gone/data", "below/gone"}) {
    const auto file = open(name);
    ASSERT_FALSE(ok(file)) << name;
    EXPECT_TRUE(is_system_error(file.error(), ENOENT, "open", checkpoint(name)));
  }
}

TEST_P(Beneath, AFileInPlaceOfAFolderIsASystemError) {
  const auto file = open("data/below");
  ASSERT_FALSE(ok(file));
  EXPECT_TRUE(is_system_error(file.error(), ENOTDIR, "open", checkpoint("data/below")));
}

TEST_P(Beneath, FilesOfAMovedDirectoryCanStillBeOpened) {
  auto directory = Directory::open(directory_path());
  ASSERT_TRUE(ok(directory));
  std::filesystem::rename(directory_path(), directory_path() + "-moved");
  std::filesystem::create_directory(directory_path());
  write_file(checkpoint("data"), "another");
  const auto file = directory->open_for_read("data");
  ASSERT_TRUE(ok(file));
  EXPECT_EQ(contents_of(*file), "data");
}

TEST_P(Beneath, NoDescriptorLeaks) {
  link("below", "link");
  const auto count = [] {
    std::size_t open = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
      ++open;
    return open;
  };
  const std::size_t before = count();
  for (const std::string name :
       {"data", "below/deep/data", "below/gone", "link/deep/data", "below", "../secret"}) {
    static_cast<void>(open(name));
  }
  EXPECT_EQ(count(), before);
}

INSTANTIATE_TEST_SUITE_P(Kernels, Beneath, ::testing::Values(0, ENOSYS, EPERM, EINVAL),
                         [](const ::testing::TestParamInfo<int>& error) -> std::string {
                           switch (error.param) {
                             case 0:
                               return "WithOpenat2";
                             case ENOSYS:
                               return "WithoutOpenat2";
                             case EPERM:
                               return "InASandboxThatForbidsIt";
                             default:
                               return "InASandboxThatDoesNotKnowIt";
                           }
                         });

TEST(Directory, AFailureToOpenAFileIsReported) {
  TempDir directory;
  write_file(directory.file("data"), "data");
  auto opened = Directory::open(directory.path());
  ASSERT_TRUE(ok(opened));
  for (const std::string operation : {"open", "openat2"}) {
    ScopedFaultHook hook(test::NthCallFails(operation, 1, EMFILE));
    const auto file = opened->open_for_read("data");
    ASSERT_FALSE(ok(file)) << operation;
    EXPECT_TRUE(is_system_error(file.error(), EMFILE, operation, directory.file("data")));
  }
}

TEST(Directory, OpeningAMissingDirectoryIsASystemErrorWithItsPath) {
  TempDir directory;
  const auto opened = Directory::open(directory.file("gone"));
  ASSERT_FALSE(ok(opened));
  EXPECT_TRUE(is_system_error(opened.error(), ENOENT, "open", directory.file("gone")));
}

}  // namespace
}  // namespace torch_ckpt::os
