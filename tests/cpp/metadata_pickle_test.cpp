#include "index/metadata_pickle.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "stock_metadata.h"
#include "support.h"

namespace torch_ckpt::index {
namespace {

using namespace std::string_literals;
using namespace test;

const Globals& globals() {
  static const Globals kGlobals = {
      {"m value", GlobalRole::value},      {"m function", GlobalRole::function},
      {"m Enum", GlobalRole::enumeration}, {"m member", GlobalRole::member},
      {"m mapping", GlobalRole::mapping},  {"m Plain", GlobalRole::dict_class},
      {"m Key", GlobalRole::key_class},    {"m Tuple", GlobalRole::tuple_class},
      {"m Slots", GlobalRole::slots_class}};
  return kGlobals;
}

/// Returns the offset of the program's end.
Result<std::size_t> check(std::string_view program, const Globals& allowed = globals()) {
  auto pickle = walk_metadata_pickle(bytes_of(program), allowed);
  if (!pickle) return std::move(pickle).error();
  return pickle->values.end;
}

/// Adds PROTO unless the program has one.
std::string with_protocol(const std::string& program) {
  return program.starts_with("\x80") ? program : "\x80\4"s + program;
}

testing::AssertionResult accepts(const std::string& given) {
  const std::string program = with_protocol(given);
  const auto end = check(program);
  if (!end) return ok(end);
  if (*end == program.size()) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "ends at " << *end << " of " << program.size();
}
testing::AssertionResult refuses(const std::string& program, Errc code) {
  return fails(check(with_protocol(program)), code);
}

std::string little_endian(std::uint64_t value, std::size_t bytes) {
  std::string out;
  for (std::size_t i = 0; i < bytes; ++i) out += static_cast<char>((value >> (8 * i)) & 0xff);
  return out;
}
std::string times(std::size_t count, const std::string& part) {
  std::string out;
  for (std::size_t i = 0; i < count; ++i) out += part;
  return out;
}

const std::string kFunction = "cm\nfunction\n";
const std::string kMapping = "cm\nmapping\n";
const std::string kValue = "cm\nvalue\n";
const std::string kPlain = "cm\nPlain\n)\x81"s;  // an instance
const std::string kKey = "cm\nKey\n)\x81"s;
const std::string kTuple = "cm\nTuple\n)\x81"s;
const std::string kSlots = "cm\nSlots\n)\x81"s;
const std::string kState = "}X\1\0\0\0xK\1s"s;  // {"x": 1}
const std::string kMemoize = "\x94"s;

class StockMetadataPickle : public ::testing::TestWithParam<StockMetadata> {};

TEST_P(StockMetadataPickle, IsAccepted) {
  const auto pickle = GetParam().pickle;
  const auto end = check(pickle, test::stock_globals());
  ASSERT_TRUE(ok(end));
  EXPECT_EQ(*end, pickle.size());
}

TEST_P(StockMetadataPickle, IsTruncatedIfCutAnywhere) {
  const auto pickle = GetParam().pickle;
  for (std::size_t length = 0; length < pickle.size(); ++length) {
    const auto end = check(pickle.substr(0, length), test::stock_globals());
    ASSERT_TRUE(fails(end, Errc::pickle_truncated)) << "cut to " << length;
  }
}

INSTANTIATE_TEST_SUITE_P(Metadata, StockMetadataPickle, ::testing::ValuesIn(stock_metadata()),
                         [](const auto& metadata) { return metadata.param.name; });

// --- what metadata may contain -------------------------------------------------------------------

TEST(MetadataPickle, EndsAfterStopEvenIfBytesFollow) {
  const auto end = check("\x80\4N.more"s);
  ASSERT_TRUE(ok(end));
  EXPECT_EQ(*end, 4);
}

TEST(MetadataPickle, MayHaveProtocols2To5) {
  for (const char protocol : {'\2', '\3', '\4', '\5'}) {
    EXPECT_TRUE(accepts("\x80"s + protocol + "N.")) << static_cast<int>(protocol);
  }
}

TEST(MetadataPickle, MayCallAnEnumOrLookUpItsMember) {
  const std::string text = "X\1\0\0\0a"s;
  const std::string looked_up = "cm\nmember\ncm\nEnum\n" + text + "\x86";
  EXPECT_TRUE(accepts("\x80\4cm\nEnum\nK\1\x85R."s));
  EXPECT_TRUE(accepts("\x80\4"s + looked_up + "R."));
  EXPECT_TRUE(accepts("\x80\4]"s + looked_up + "Ra."));
  // Not of a class, not by a number, not with three arguments, not as a value, not for another
  // function, not as a state.
  EXPECT_TRUE(refuses("\x80\4cm\nmember\ncm\nPlain\n"s + text + "\x86R.", Errc::pickle_stack));
  EXPECT_TRUE(refuses("\x80\4cm\nmember\ncm\nEnum\nK\1\x86R."s, Errc::pickle_stack));
  EXPECT_TRUE(refuses("\x80\4cm\nmember\ncm\nEnum\n"s + text + "N\x87R.", Errc::pickle_stack));
  EXPECT_TRUE(refuses("\x80\4]cm\nEnum\n"s + text + "\x86" + "a.", Errc::pickle_stack));
  EXPECT_TRUE(refuses("\x80\4cm\nfunction\ncm\nEnum\n"s + text + "\x86R.", Errc::pickle_call));
  EXPECT_TRUE(refuses("\x80\4cm\nmember\nK\1\x85R."s, Errc::pickle_forbidden));
  EXPECT_TRUE(
      refuses("\x80\4"s + kTuple + "cm\nEnum\n" + text + "\x86" + "b.", Errc::pickle_state));
}

TEST(MetadataPickle, MayHaveScalars) {
  for (const std::string& scalar :
       {"N"s, "\x88"s, "\x89"s, "K\xff"s, "M\xff\xff"s, "J\xff\xff\xff\xff"s, "\x8a\0"s,
        "\x8a\x10"s + std::string(16, '\1'), "G"s + std::string(8, '\1')}) {
    EXPECT_TRUE(accepts(scalar + ".")) << testing::PrintToString(scalar);
  }
}

TEST(MetadataPickle, MayHaveTextsAndBytesWithEachSizeOfLength) {
  for (const std::string& text : {"\x8c\2ab"s, "X\2\0\0\0ab"s, "\x8d\2\0\0\0\0\0\0\0ab"s, "C\2ab"s,
                                  "B\2\0\0\0ab"s, "\x8e\2\0\0\0\0\0\0\0ab"s}) {
    EXPECT_TRUE(accepts(text + ".")) << testing::PrintToString(text);
  }
}

TEST(MetadataPickle, MayHaveTuplesAndLists) {
  for (const std::string& program : {")."s, "N\x85."s, "NN\x86."s, "NNN\x87."s, "(NNNNt."s, "(t."s,
                                     "]."s, "]Na."s, "](NNNe."s, "](e."s, "](NNe(NNe."s}) {
    EXPECT_TRUE(accepts(program)) << testing::PrintToString(program);
  }
}

TEST(MetadataPickle, MayHaveDictsWithEachKindOfKey) {
  for (const std::string& key : {"X\1\0\0\0k"s, "K\1"s, "J\xff\xff\xff\xff"s, ")"s,
                                 "X\1\0\0\0kK\1N\x85\x87"s, kKey, kKey + kState + "b"}) {
    EXPECT_TRUE(accepts("}" + key + "Ns.")) << testing::PrintToString(key);
    EXPECT_TRUE(accepts("}(" + key + "N" + key + "]u.")) << testing::PrintToString(key);
  }
}

TEST(MetadataPickle, MayHaveAnAllowedGlobal) {
  EXPECT_TRUE(accepts(kValue + "."));
  EXPECT_TRUE(accepts("\x8c\1m\x8c\5value\x93."s));
}

TEST(MetadataPickle, MayCallFunctionsWithScalarsAndTuples) {
  EXPECT_TRUE(accepts(kFunction + ")R."));
  EXPECT_TRUE(accepts(kFunction + "K\1X\1\0\0\0a\x86\x85R."s));
}

TEST(MetadataPickle, MayHaveAMappingWithItems) {
  EXPECT_TRUE(accepts(kMapping + ")R(X\1\0\0\0aN)Nu."s));
}

TEST(MetadataPickle, MayHaveObjectsWithTheStateOfTheirClass) {
  EXPECT_TRUE(accepts(kPlain + "."));
  EXPECT_TRUE(accepts(kPlain + kState + "b."));
  EXPECT_TRUE(accepts(kKey + kState + "b."));
  EXPECT_TRUE(accepts(kTuple + "NN\x86"s + "b."));
  EXPECT_TRUE(accepts(kSlots + "N" + kState + "\x86"s + "b."));
}

TEST(MetadataPickle, MayFetchValuesFromTheMemo) {
  EXPECT_TRUE(accepts("](" + kPlain + kMemoize + kState + "bh\0h\0j\0\0\0\0e."s));
  EXPECT_TRUE(accepts("]q\0(]q\1]r\2\0\0\0h\1e."s));
}

TEST(MetadataPickle, MayHaveFrames) { EXPECT_TRUE(accepts("\x95" + little_endian(2, 8) + "N.")); }

TEST(MetadataPickle, MayBeNestedUpToTheLimit) {
  EXPECT_TRUE(accepts(")" + times(MetadataLimits::kDepth, "\x85") + "."));
}

// --- pickle_truncated ----------------------------------------------------------------------------

TEST(MetadataPickle, IsTruncatedIfATextEndsPastTheEnd) {
  EXPECT_TRUE(refuses("\x8c\2a", Errc::pickle_truncated));
  EXPECT_TRUE(refuses("X\xff\xff\xff\xff.", Errc::pickle_truncated));
  EXPECT_TRUE(refuses("\x8d" + times(8, "\xff") + ".", Errc::pickle_truncated));
}

TEST(MetadataPickle, IsTruncatedIfBytesEndPastTheEnd) {
  EXPECT_TRUE(refuses("C\2a", Errc::pickle_truncated));
  EXPECT_TRUE(refuses("B\xff\xff\xff\xff.", Errc::pickle_truncated));
  EXPECT_TRUE(refuses("\x8e" + little_endian(1ULL << 40, 8) + ".", Errc::pickle_truncated));
}

TEST(MetadataPickle, IsTruncatedIfAFrameEndsPastTheEnd) {
  EXPECT_TRUE(refuses("\x95" + little_endian(3, 8) + "N.", Errc::pickle_truncated));
  EXPECT_TRUE(refuses("\x95" + little_endian(~0ULL, 8) + "N.", Errc::pickle_truncated));
}

TEST(MetadataPickle, IsTruncatedIfAFrameEndsAfterStop) {
  EXPECT_TRUE(refuses("\x95" + little_endian(3, 8) + "N.more", Errc::pickle_truncated));
}

// --- pickle_opcode -------------------------------------------------------------------------------

TEST(MetadataPickle, MustNotHaveOtherOpcodes) {
  const std::string known =
      "(.JKMNRXabc}ehj]qrst)uGBC\x80\x81\x85\x86\x87\x88\x89\x8a\x8c\x8d\x8e\x93\x94\x95";
  for (int code = 0; code < 256; ++code) {
    if (known.find(static_cast<char>(code)) != std::string::npos) continue;
    EXPECT_TRUE(
        refuses(std::string(1, static_cast<char>(code)) + times(20, "\n"), Errc::pickle_opcode))
        << code;
  }
}

TEST(MetadataPickle, MustNotHaveOtherProtocols) {
  EXPECT_TRUE(refuses("\x80\1N.", Errc::pickle_opcode));
  EXPECT_TRUE(refuses("\x80\6N.", Errc::pickle_opcode));
}

TEST(MetadataPickle, MustNotChangeItsProtocol) {
  EXPECT_TRUE(refuses("\x80\4\x80\2N.", Errc::pickle_opcode));
}

// --- pickle_stack --------------------------------------------------------------------------------

TEST(MetadataPickle, MustNotTakeMoreThanTheStackHas) {
  for (const std::string& program :
       {"."s, "\x85."s, "N\x86."s, "NN\x87."s, "a."s, "Na."s, "s."s, "}Ks."s, "R."s, "NR."s,
        "\x81."s, "b."s, kPlain + "b.", "\x93."s, "\x94."s, "q\0."s}) {
    EXPECT_TRUE(refuses(program, Errc::pickle_stack)) << testing::PrintToString(program);
  }
}

TEST(MetadataPickle, MustNotTakeValuesBelowAMark) {
  EXPECT_TRUE(refuses("N(\x85t.", Errc::pickle_stack));
  EXPECT_TRUE(refuses("](Nat.", Errc::pickle_stack));
}

TEST(MetadataPickle, MustHaveTheMarkThatAnOpcodeNeeds) {
  for (const std::string& program : {"t."s, "]Ne."s, "}NNu."s}) {
    EXPECT_TRUE(refuses(program, Errc::pickle_stack)) << testing::PrintToString(program);
  }
}

TEST(MetadataPickle, MustEndWithOneValue) {
  EXPECT_TRUE(refuses("NN.", Errc::pickle_stack));
  EXPECT_TRUE(refuses("N(.", Errc::pickle_stack));
  EXPECT_TRUE(refuses("(N.", Errc::pickle_stack));
}

TEST(MetadataPickle, MustNotAddItemsToOtherValuesThanContainers) {
  EXPECT_TRUE(refuses("}Na.", Errc::pickle_stack));
  EXPECT_TRUE(refuses("](K\1Nu.", Errc::pickle_stack));
  EXPECT_TRUE(refuses(kPlain + "(K\1Nu.", Errc::pickle_stack));
  EXPECT_TRUE(refuses(kFunction + ")R(Ne.", Errc::pickle_stack));
}

TEST(MetadataPickle, MustHaveAValueForEachKey) {
  EXPECT_TRUE(refuses("}(K\1u.", Errc::pickle_stack));
}

TEST(MetadataPickle, MustNotHaveAGlobalWhoseNameIsNoText) {
  EXPECT_TRUE(refuses("\x8c\1mC\5value\x93.", Errc::pickle_stack));
}

TEST(MetadataPickle, MustNotUseAClassOrFunctionAsAValue) {
  for (const std::string& name : {kFunction, kMapping, "cm\nPlain\n"s, "cm\nTuple\n"s}) {
    EXPECT_TRUE(refuses(name + ".", Errc::pickle_stack)) << name;
    EXPECT_TRUE(refuses(name + "\x85.", Errc::pickle_stack)) << name;
    EXPECT_TRUE(refuses("]" + name + "a.", Errc::pickle_stack)) << name;
    EXPECT_TRUE(refuses("}K\1" + name + "s.", Errc::pickle_stack)) << name;
  }
}

TEST(MetadataPickle, MustNotFetchWhatIsNotMemoized) {
  EXPECT_TRUE(refuses("h\0."s, Errc::pickle_stack));
  EXPECT_TRUE(refuses("Nq\0j\1\0\0\0\x86."s, Errc::pickle_stack));
}

TEST(MetadataPickle, MustMemoizeAtTheNextIndex) {
  EXPECT_TRUE(refuses("Nq\1."s, Errc::pickle_stack));
  EXPECT_TRUE(refuses("Nr\xff\xff\xff\x7f."s, Errc::pickle_stack));
  EXPECT_TRUE(refuses("Nq\0q\0."s, Errc::pickle_stack));
}

TEST(MetadataPickle, MustBeginWithProto) {
  EXPECT_TRUE(fails(check("N."), Errc::pickle_opcode));
  EXPECT_TRUE(fails(check("X\1\0\0\0x."s), Errc::pickle_opcode));
  EXPECT_TRUE(accepts("N."));
}

// --- pickle_forbidden ----------------------------------------------------------------------------

TEST(MetadataPickle, MustNotHaveOtherGlobals) {
  for (const std::string& name : {"cos\nsystem\n"s, "cm\nvalue.real\n"s, "c\nm value\n"s,
                                  "cm value\n\n"s, "\x8c\2os\x8c\6system\x93"s}) {
    EXPECT_TRUE(refuses(name + ".", Errc::pickle_forbidden)) << name;
  }
}

TEST(MetadataPickle, ReportsAForbiddenGlobalInPrintableCharacters) {
  EXPECT_EQ(check("\x80\4cos\nsys\x1b\xfftem\n.").error().message(),
            "the metadata names os.sys??tem, which is not on the allow-list for metadata");
}

// --- pickle_call ---------------------------------------------------------------------------------

TEST(MetadataPickle, MustNotCallOtherValuesThanFunctions) {
  for (const std::string& callee : {"N"s, kValue, "cm\nPlain\n"s, kPlain, "X\1\0\0\0a"s}) {
    EXPECT_TRUE(refuses(callee + ")R.", Errc::pickle_call)) << testing::PrintToString(callee);
  }
}

TEST(MetadataPickle, MustNotCallAFunctionWithOtherArguments) {
  for (const std::string& argument : {"]"s, "}"s, "C\1a"s, kPlain, kValue, kFunction + ")R"}) {
    EXPECT_TRUE(refuses(kFunction + argument + "\x85R.", Errc::pickle_call))
        << testing::PrintToString(argument);
  }
  EXPECT_TRUE(refuses(kFunction + "]R.", Errc::pickle_call));
}

TEST(MetadataPickle, MustNotCreateAMappingWithArguments) {
  EXPECT_TRUE(refuses(kMapping + ")\x85R.", Errc::pickle_call));
}

TEST(MetadataPickle, MustNotCreateAnObjectOfOtherValuesThanClasses) {
  for (const std::string& callee : {"N"s, kValue, kFunction, kMapping, kPlain}) {
    EXPECT_TRUE(refuses(callee + ")\x81.", Errc::pickle_call)) << testing::PrintToString(callee);
  }
}

TEST(MetadataPickle, MustNotCreateAnObjectWithArguments) {
  EXPECT_TRUE(refuses("cm\nPlain\nN\x85\x81.", Errc::pickle_call));
  EXPECT_TRUE(refuses("cm\nPlain\n]\x81.", Errc::pickle_call));
}

// --- pickle_state --------------------------------------------------------------------------------

TEST(MetadataPickle, MustNotSetTheStateOfAClass) {
  EXPECT_TRUE(refuses("cm\nPlain\nN" + kState + "\x86" + "b.", Errc::pickle_state));
}

TEST(MetadataPickle, MustNotSetTheStateOfTheResultOfACall) {
  EXPECT_TRUE(refuses(kFunction + "K\1\x85R" + kState + "b.", Errc::pickle_state));
  EXPECT_TRUE(refuses(kMapping + ")R" + kState + "b.", Errc::pickle_state));
}

TEST(MetadataPickle, MustNotSetTheStateOfOtherValuesThanInstances) {
  EXPECT_TRUE(refuses(kValue + kState + "b.", Errc::pickle_state));
  EXPECT_TRUE(refuses("]" + kState + "b.", Errc::pickle_state));
}

TEST(MetadataPickle, MustNotSetAStateTwice) {
  EXPECT_TRUE(refuses(kPlain + kState + "b" + kState + "b.", Errc::pickle_state));
}

TEST(MetadataPickle, MustNotSetAStateOfAnotherForm) {
  const std::string slots = "N" + kState + "\x86";
  for (const std::string& state : {"N"s, "]"s, "NN\x86"s, slots, kPlain}) {
    EXPECT_TRUE(refuses(kPlain + state + "b.", Errc::pickle_state))
        << testing::PrintToString(state);
  }
  EXPECT_TRUE(refuses(kTuple + kState + "b.", Errc::pickle_state));
  EXPECT_TRUE(refuses(kSlots + kState + "b.", Errc::pickle_state));
  EXPECT_TRUE(refuses(kSlots + kState + kState + "\x86" + "b.", Errc::pickle_state));
}

TEST(MetadataPickle, MustNotSetAStateWithOtherKeysThanNames) {
  EXPECT_TRUE(refuses(kPlain + "}K\1Nsb.", Errc::pickle_state));
  EXPECT_TRUE(refuses(kPlain + "}X\5\0\0\0__x__Nsb."s, Errc::pickle_state));
  EXPECT_TRUE(refuses(kSlots + "N}X\5\0\0\0__x__Ns\x86"s + "b.", Errc::pickle_state));
}

// --- pickle_key ----------------------------------------------------------------------------------

TEST(MetadataPickle, MustNotHaveOtherKindsOfKeys) {
  for (const std::string& key :
       {"]"s, "}"s, "C\1a"s, "G"s + std::string(8, '\1'), "\x8a\10\0\0\0\0\0\0\0\1"s, kPlain,
        kValue, kFunction + ")R", "]\x85"s, kKey + "\x85"}) {
    EXPECT_TRUE(refuses("}" + key + "Ns.", Errc::pickle_key)) << testing::PrintToString(key);
  }
}

TEST(MetadataPickle, MustNotHaveAKeyOfManyValues) {
  EXPECT_TRUE(accepts("}(" + times(MetadataLimits::kKeyWeight - 1, "N") + "tNs."));
  EXPECT_TRUE(refuses("}(" + times(MetadataLimits::kKeyWeight, "N") + "tNs.", Errc::pickle_key));
}

// --- states that are kept as records -------------------------------------------------------------

const std::string kShardClass = "torch.distributed.checkpoint.metadata ChunkStorageMetadata";
const std::string kShard = "ctorch.distributed.checkpoint.metadata\nChunkStorageMetadata\n)\x81"s;

/// Items of a state of a shard that begins at (offset,).
std::string shard_items(char offset) {
  return "(X\7\0\0\0offsetsK"s + offset + "\x85X\5\0\0\0sizesK\1\x85u"s;
}

TEST(MetadataPickle, KeepsEachObjectAfterAStateWasDropped) {
  // The list, which is created after the second state, must keep its number.
  const std::string with_list = "}X\4\0\0\0more]\x94s"s + shard_items('\2');
  const std::string program = with_protocol("](" + kShard + "}" + shard_items('\1') + "b" + kShard +
                                            with_list + "bh\0](NNee."s);
  Globals allowed = globals();
  allowed.emplace(kShardClass, GlobalRole::dict_class);
  const auto pickle = walk_metadata_pickle(bytes_of(program), allowed);
  ASSERT_TRUE(ok(pickle));
  const PickleValues& values = pickle->values;
  std::vector<std::string> found;
  values.for_each(*values.object(values.root, ObjectKind::list), [&](const Value& part) {
    if (const Object* list = values.object(part, ObjectKind::list)) {
      found.push_back(std::to_string(values.count(*list)) + " values");
    } else {
      const ShardRecord& shard = pickle->records.shards.at(values.objects[part.number()].first);
      found.push_back("shard at " + listed(values.extents.at(shard.offsets.id)));
    }
  });
  EXPECT_EQ(found,
            (std::vector<std::string>{"shard at [1]", "shard at [2]", "0 values", "2 values"}));
}

TEST(MetadataPickle, MustNotUseAStateOfARecordAgain) {
  Globals allowed = globals();
  allowed.emplace(kShardClass, GlobalRole::dict_class);
  const std::string state = "}" + kMemoize + shard_items('\1');
  EXPECT_TRUE(ok(check(with_protocol("](" + kShard + state + "be."), allowed)));
  EXPECT_TRUE(
      fails(check(with_protocol("](" + kShard + state + "bh\0e."s), allowed), Errc::pickle_shared));
}

// --- pickle_shared -------------------------------------------------------------------------------

TEST(MetadataPickle, MustNotChangeAValueThatOthersMayContain) {
  EXPECT_TRUE(refuses("]\x94h\0a."s, Errc::pickle_shared));
  EXPECT_TRUE(refuses("](]\x94h\0Na."s, Errc::pickle_shared));
  EXPECT_TRUE(refuses("}\x94K\1h\0s."s, Errc::pickle_shared));
  EXPECT_TRUE(refuses(kPlain + "\x94}X\1\0\0\0xh\0sb."s, Errc::pickle_shared));
}

// --- pickle_too_deep, pickle_too_large -----------------------------------------------------------

TEST(MetadataPickle, MustNotBeNestedDeeperThanTheLimit) {
  const std::size_t deep = MetadataLimits::kDepth + 1;
  EXPECT_TRUE(refuses(")" + times(deep, "\x85") + ".", Errc::pickle_too_deep));
  EXPECT_TRUE(refuses(times(deep + 1, "]") + times(deep, "a") + ".", Errc::pickle_too_deep));
  EXPECT_TRUE(refuses(times(deep + 1, kPlain + "}X\1\0\0\0x"s) + "N" + times(deep + 1, "sb") + ".",
                      Errc::pickle_too_deep));
}

TEST(MetadataPickle, MustNotHaveTuplesThatDouble) {
  std::string program = "N\x94";
  for (int i = 0; i < 40; ++i) program += "h"s + static_cast<char>(i) + "\x86\x94";
  EXPECT_TRUE(refuses(program + ".", Errc::pickle_too_large));
}

TEST(MetadataPickle, MustNotHaveListsThatDouble) {
  // Each list contains the previous one twice. A list is changed only before it is fetched.
  std::string program = "(]\x94";
  for (int i = 0; i < 40; ++i) {
    program += "]\x94(h"s + static_cast<char>(i) + "h" + static_cast<char>(i) + "e";
  }
  EXPECT_TRUE(refuses(program + "t.", Errc::pickle_too_large));
}

TEST(MetadataPickle, MustNotShareALongTextTooOften) {
  const auto shared = [](std::size_t times_reached) {
    const std::string text = "X" + little_endian(1 << 20, 4) + times(1 << 20, "x") + kMemoize;
    return "(" + text + times(times_reached, "h\0"s) + "t.";
  };
  EXPECT_TRUE(accepts(shared(200)));
  EXPECT_TRUE(refuses(shared(300), Errc::pickle_too_large));
}

TEST(MetadataPickle, MustNotHaveMoreObjectsThanItsSizeAllows) {
  EXPECT_TRUE(accepts("](" + times(4000, "}") + "e."));
  EXPECT_TRUE(refuses("](" + times(10000, "}") + "e.", Errc::pickle_too_large));
}

TEST(MetadataPickle, MustNotHaveAnIntegerOfManyBytes) {
  EXPECT_TRUE(refuses("\x8a\x11" + times(17, "\1") + ".", Errc::pickle_too_large));
}

TEST(MetadataPickle, MustNotHaveALongName) {
  const std::string name = times(MetadataLimits::kNameBytes, "n");
  EXPECT_TRUE(refuses("c" + name + "\nn\n.", Errc::pickle_forbidden));
  EXPECT_TRUE(refuses("c" + name + "n\nn\n.", Errc::pickle_too_large));
  const std::string text = "X" + little_endian(name.size() + 1, 4) + name + "n";
  EXPECT_TRUE(refuses("\x8c\1m" + text + "\x93.", Errc::pickle_too_large));
}

TEST(MetadataPickle, MustNotCallAFunctionWithManyArguments) {
  const std::string most = times(MetadataLimits::kArgumentsWeight - 1, "N");
  EXPECT_TRUE(accepts(kFunction + "(" + most + "tR."));
  EXPECT_TRUE(refuses(kFunction + "(N" + most + "tR.", Errc::pickle_too_large));
}

TEST(MetadataPickle, MustNotExceedTheLimitOfTheStack) {
  EXPECT_TRUE(accepts("(" + times(MetadataLimits::kStack - 1, "N") + "t."));
  EXPECT_TRUE(refuses("(" + times(MetadataLimits::kStack, "N") + "t.", Errc::pickle_too_large));
}

TEST(AllowedGlobals, HaveTheDtypesThatWereAdded) {
  const std::string program = with_protocol("ctorch\nnew_dtype\n.");
  EXPECT_TRUE(fails(check(program, *allowed_globals()), Errc::pickle_forbidden));
  const std::vector<std::string> names = {"new_dtype", "Size"};
  allow_dtypes(names);
  EXPECT_TRUE(ok(check(program, *allowed_globals())));
  EXPECT_EQ(allowed_globals()->at("torch Size"), GlobalRole::function);
}

}  // namespace
}  // namespace torch_ckpt::index
