#include "engine/context.h"

#include <gtest/gtest.h>

#include <chrono>
#include <utility>

#include "engine/save_session.h"
#include "save_files.h"
#include "support.h"

namespace torch_ckpt::engine {
namespace {

TEST(Context, IsTheSameForTheWholeProcess) { EXPECT_EQ(&Context::process(), &Context::process()); }

TEST(Context, PassedToASessionIsTheOnlyOneThatItUses) {
  Context own;
  Context& others = Context::process();
  others.executor.join();
  others.chunks.trim(0);
  const test::TempDir directory;
  test::Files files(directory);
  files.add_file("contents");
  {
    auto started = SaveSession::start(own, test::open_directory(directory), files.jobs(), {});
    ASSERT_TRUE(test::ok(started));
    ASSERT_TRUE((*started)->wait_for(std::chrono::minutes(2)));
    EXPECT_TRUE(test::ok((*started)->outcome()));
  }
  own.executor.join();
  files.expect_on_disk();
  EXPECT_GT(own.chunks.idle_bytes(), 0U);
  EXPECT_EQ(others.chunks.idle_bytes(), 0U);
}

}  // namespace
}  // namespace torch_ckpt::engine
