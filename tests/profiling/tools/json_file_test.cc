// SPDX-License-Identifier: Apache-2.0
// Files with deeply nested lists: copying and printing them would recurse as deeply.
#include <fstream>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/base/error.h>
#include <weft/profiling/tools/dumps.h>
#include <weft/profiling/tools/json_file.h>
#include <weft/profiling/tools/timeline.h>
#include <weft/tests/harness/folder.h>

namespace weft::tools {
namespace {

using testing::HasSubstr;

std::string nested(std::size_t depth) { return std::string(depth, '[') + std::string(depth, ']'); }

class JsonFile : public testing::Test {
 protected:
  template <class F>
  std::string error_of(const std::string& text, F read) {
    std::ofstream(path_) << text;
    try {
      read(path_);
      return "";
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Caller);
      return error.text();
    }
  }
  static void as_dump(const std::string& path) { read_dumps({path}); }
  static void as_run(const std::string& path) { read_run(path); }

  const harness::Folder folder_;
  const std::string path_ = folder_.path() + "/deep.json";
};

TEST_F(JsonFile, TooDeepNestingIsRefusedByName) {
  constexpr std::size_t kDeep = 400'000;
  const std::string dump =
      R"({"weft":"flight recorder 1","host":"h","pid":1,"time":0,"wall_clock":0,"reason":"",)";
  for (const std::string& rest :
       {R"("parties":[],"records":[],"jobs":[)" + nested(kDeep) + "]}",
        R"("parties":[{"party":0,"rank":0,"kind":"group","name":"default","generation":0,)"
        R"("ranks":[)" +
            nested(kDeep) + R"(]}],"records":[]})"}) {
    EXPECT_THAT(error_of(dump + rest, as_dump),
                HasSubstr("deep.json' is damaged: it has lists more than 32 deep"));
  }
  EXPECT_THAT(error_of(R"({"weft":)" + nested(kDeep) + "}", as_dump),
              HasSubstr("deep.json' is not a dump"));
  EXPECT_THAT(error_of(R"({"otherData":{"weft":)" + nested(kDeep) + "}}", as_run),
              HasSubstr("deep.json' is not a timeline"));
  EXPECT_THAT(error_of(R"({"displayTimeUnit":"ms","traceEvents":[],"otherData":{"ranks":)" +
                           nested(kDeep) + "}}",
                       as_run),
              HasSubstr("deep.json' is damaged: it has lists more than 32 deep"));
}

TEST_F(JsonFile, BracketsInTextsDoNotNest) {
  const FileKind any{"list", "", "", 1 << 20};
  const auto read = [&](const std::string& path) { read_json(path, any); };
  const std::string many(1000, '[');
  EXPECT_EQ(error_of(R"({"a":")" + many + R"(","b\"":"\\","c":"\"{)" + many +
                         "\",\"d\":" + nested(31) + "}",
                     read),
            "");
  EXPECT_THAT(error_of(R"({"a":"\\","d":)" + nested(32) + "}", read), HasSubstr("deep"));
  // More lists than are ever open at once, and a text that spans two blocks.
  std::string wide = R"({"a":[)";
  while (wide.size() < 100'000) wide += "[\"[\\\"\"],{},";
  EXPECT_EQ(error_of(wide + "0]}", read), "");
}

}  // namespace
}  // namespace weft::tools
