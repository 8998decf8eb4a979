#include "os/function_table.h"

#include <gtest/gtest.h>

#include <string>

namespace torch_ckpt::os {
namespace {

int twice(int number) { return 2 * number; }

void* look_up(const std::string& name) {
  return name == "twice" ? reinterpret_cast<void*>(&twice) : nullptr;
}

TEST(FunctionTable, CallsAFunctionThatItHasFound) {
  FunctionTable table;
  const Function<int(int)> function(table, "twice");
  EXPECT_FALSE(function);
  EXPECT_EQ(table.load(look_up), nullptr);
  ASSERT_TRUE(function);
  EXPECT_EQ(function(4), 8);
}

TEST(FunctionTable, ReturnsTheFirstRequiredFunctionThatIsMissing) {
  FunctionTable table;
  const Function<int(int)> optional(table, "thrice", Presence::optional);
  const Function<int(int)> found(table, "twice");
  EXPECT_EQ(table.load(look_up), nullptr);
  EXPECT_FALSE(optional);
  const Function<int(int)> first(table, "four_times");
  const Function<int(int)> second(table, "five_times");
  EXPECT_STREQ(table.load(look_up), "four_times");
  EXPECT_TRUE(found);
}

TEST(LoadedLibrary, FindsFunctionsOfALibraryThatTheProcessHasLoaded) {
  const Lookup library = loaded_library("libc.so.6");
  ASSERT_TRUE(library);
  EXPECT_NE(library("malloc"), nullptr);
  EXPECT_EQ(library("no_such_function"), nullptr);
}

TEST(LoadedLibrary, IsEmptyIfTheProcessHasNotLoadedTheLibrary) {
  EXPECT_FALSE(loaded_library("libno_such_library.so.1"));
}

}  // namespace
}  // namespace torch_ckpt::os
