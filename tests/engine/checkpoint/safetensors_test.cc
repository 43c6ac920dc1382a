// SPDX-License-Identifier: Apache-2.0
// The headers of safetensors files and the manifest: what is written is read again, and anything
// else is refused.
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/base/error.h>
#include <weft/engine/checkpoint/manifest.h>
#include <weft/engine/checkpoint/safetensors.h>
#include <weft/tests/harness/ranks.h>

namespace weft::checkpoint {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string refused(const std::string& json, std::uint64_t data_bytes) {
  const Error error = harness::error_of([&] { parse_header(json, data_bytes); });
  EXPECT_EQ(error.blame(), Blame::Caller);
  return error.text();
}

std::string entry(const std::string& name, const std::string& shape, const std::string& offsets,
                  const std::string& dtype = "F32") {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape +
         ",\"data_offsets\":" + offsets + "}";
}

TEST(Safetensors, HeaderComesBack) {
  Header header;
  header.metadata = {{"format", "pt"}};
  header.slices = {{"b\"ä", c10::ScalarType::Half, {3}, {0}, 0, 0},
                   {"rows", c10::ScalarType::Double, {2, 5}, {4, 0}, 0, 0},
                   {"scalar", c10::ScalarType::Bool, {}, {}, 0, 0},
                   {"empty", c10::ScalarType::UInt64, {0, 7}, {0, 0}, 0, 0}};
  const std::uint64_t data = lay_out(header.slices);
  EXPECT_EQ(data, 80 + 6 + 1);
  const std::string front = encode(header);
  EXPECT_EQ(front.size() % 8, 0);
  const std::uint64_t length = header_length(front.substr(0, 8), front.size() + data);
  ASSERT_EQ(length, front.size() - kHeaderLength);
  const Header read = parse_header(front.substr(kHeaderLength), data);
  ASSERT_EQ(read.slices.size(), 4);
  EXPECT_EQ(read.metadata.at("format"), "pt");
  for (const Slice& slice : read.slices) {
    const auto same = std::ranges::find(header.slices, slice.name, &Slice::name);
    ASSERT_NE(same, header.slices.end());
    EXPECT_EQ(slice.dtype, same->dtype);
    EXPECT_EQ(slice.shape, same->shape);
    EXPECT_EQ(slice.offsets, same->offsets);
    EXPECT_EQ(slice.begin, same->begin);
    EXPECT_EQ(slice.bytes, same->bytes);
    EXPECT_EQ(slice.begin % c10::elementSize(slice.dtype), 0);
  }
}

TEST(Safetensors, SlicesThatFillBlocksBeginAtThem) {
  std::vector<Slice> slices = {{"lr", c10::ScalarType::Double, {}, {}, 0, 0},
                               {"half", c10::ScalarType::Half, {3, 2'048}, {0, 0}, 0, 0},
                               {"odd", c10::ScalarType::Float, {1'025}, {0}, 0, 0},
                               {"moment", c10::ScalarType::Float, {1'024, 2}, {0, 0}, 0, 0}};
  EXPECT_EQ(lay_out(slices), 8 + 12'288 + 4'100 + 8'192);
  for (const Slice& slice : slices) {
    EXPECT_EQ(slice.begin % (slice.bytes % 4'096 == 0 ? 4'096 : c10::elementSize(slice.dtype)), 0)
        << slice.name;
  }
}

TEST(Safetensors, WrongHeadersAreRefused) {
  const auto in_braces = [](const std::string& text) { return "{" + text + "}"; };
  EXPECT_THAT(refused("", 0), HasSubstr("cannot be parsed"));
  EXPECT_THAT(refused("[]", 0), HasSubstr("no JSON object"));
  EXPECT_THAT(refused(in_braces(entry("a", "[2]", "[0,8]")), 12), HasSubstr("more bytes than"));
  EXPECT_THAT(refused(in_braces(entry("a", "[2]", "[0,8]")), 4), HasSubstr("not inside of"));
  EXPECT_THAT(refused(in_braces(entry("a", "[2]", "[8,0]")), 8), HasSubstr("not inside of"));
  EXPECT_THAT(refused(in_braces(entry("a", "[3]", "[0,8]")), 8), HasSubstr("does not fit its"));
  EXPECT_THAT(refused(in_braces(entry("a", "[-2]", "[0,8]")), 8), HasSubstr("negative"));
  EXPECT_THAT(refused(in_braces(entry("a", "[2]", "[0,8]", "F33")), 8), HasSubstr("dtype"));
  EXPECT_THAT(refused(in_braces(entry("a", "[1000000000,1000000000,1000000000]", "[0,8]")), 8),
              HasSubstr("more bytes than any memory"));
  EXPECT_THAT(
      refused(in_braces(entry("a", "[2]", "[0,8]") + "," + entry("b", "[2]", "[4,12]")), 12),
      HasSubstr("overlap"));
  EXPECT_THAT(
      refused(in_braces(entry("a", "[2]", "[0,8]") + "," + entry("b", "[2]", "[12,20]")), 20),
      HasSubstr("hole in front of 'b'"));
  EXPECT_THAT(refused(in_braces(entry("a", "[2]", "[0,8]") + "," + entry("a", "[2]", "[0,8]")), 8),
              HasSubstr("names 'a' twice"));
  EXPECT_THAT(refused(in_braces(entry("a", "[2.5]", "[0,8]")), 8), HasSubstr("no integer"));
  EXPECT_THAT(refused(in_braces(entry("a", "[18446744073709551615]", "[0,8]")), 8),
              HasSubstr("no integer, or too large"));
  EXPECT_THAT(refused(R"({"__metadata__":{"a":1}})", 0), HasSubstr("no string"));
  EXPECT_THAT(
      refused(R"({"__metadata__":{"DCP_SHARDING_INFO":"{\"a\":{\"saved_offsets\":[1,2]}}"},)" +
                  entry("a", "[2]", "[0,8]") + "}",
              8),
      HasSubstr("saved_offsets of 'a'"));
  std::string front(8, '\0');
  for (const auto& [length, bytes] :
       std::vector<std::pair<std::uint64_t, std::uint64_t>>{{kMostHeader + 1, 1u << 30}, {9, 16}}) {
    for (std::size_t i = 0; i < 8; ++i) front[i] = static_cast<char>(length >> (8 * i));
    EXPECT_THAT(harness::error_of([&] { header_length(front, bytes); }).text(),
                HasSubstr("it is longer than"));
  }
  EXPECT_THAT(harness::error_of([&] { header_length("abc", 3); }).text(), HasSubstr("too short"));
}

Manifest two_rows() {
  Manifest manifest;
  manifest.ranks = 2;
  manifest.parts = {{"a", "'a', a tensor"}};
  for (int i = 0; i < 2; ++i) {
    SavedFile file;
    file.name = "rank" + std::to_string(i);
    file.data = 64;
    file.bytes = 64 + 24;
    file.header = "h";
    file.slices = {{{"a", c10::ScalarType::Float, {2, 3}, {2 * i, 0}, 0, 24}, {"c"}, "kind"}};
    manifest.files.push_back(file);
  }
  return manifest;
}

TEST(SavedManifest, ComesBack) {
  const Manifest read = parse_manifest(encode(two_rows()));
  EXPECT_EQ(read.ranks, 2);
  EXPECT_EQ(read.parts, two_rows().parts);
  const auto tensors = tensors_of(read);
  ASSERT_EQ(tensors.size(), 1);
  EXPECT_THAT(tensors.at("a").shape, ElementsAre(4, 3));
  EXPECT_EQ(tensors.at("a").kind, "kind");
  EXPECT_EQ(tensors.at("a").slices[1].file, &read.files[1]);
  EXPECT_EQ(tensors.at("a").slices[1].slice->checksums, std::vector<std::string>{"c"});
}

TEST(SavedManifest, HolesAndOverlapsAreRefused) {
  const auto text_of = [](const std::function<void(Manifest&)>& change) {
    Manifest manifest = two_rows();
    change(manifest);
    const Error error = harness::error_of([&] { parse_manifest(encode(manifest)); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    return error.text();
  };
  const auto second = [](Manifest& manifest) -> Slice& {
    return manifest.files[1].slices[0].slice;
  };
  EXPECT_THAT(text_of([&](Manifest& m) { second(m).offsets = {1, 0}; }), HasSubstr("overlap"));
  EXPECT_THAT(text_of([&](Manifest& m) { second(m).offsets = {3, 0}; }), HasSubstr("is missing"));
  // Rows 1 and 2 twice and row 4 never, with an empty slice between the two that overlap.
  EXPECT_THAT(text_of([&](Manifest& m) {
                second(m).offsets = {1, 0};
                SavedSlice empty = m.files[0].slices[0];
                empty.slice.shape = {0, 3};
                empty.slice.offsets = {0, 0};
                empty.slice.begin = empty.slice.bytes = 0;
                empty.checksums = {};
                m.files[0].slices.push_back(empty);
                SavedSlice last = m.files[1].slices[0];
                last.slice.shape = {1, 3};
                last.slice.offsets = {4, 0};
                last.slice.bytes = 12;
                m.files[1].slices.push_back(last);
              }),
              HasSubstr("overlap"));
  EXPECT_THAT(text_of([&](Manifest& m) { second(m).offsets = {2, 1}; }), HasSubstr("is missing"));
  EXPECT_THAT(text_of([&](Manifest& m) { second(m).offsets = {-1, 0}; }), HasSubstr("negative"));
  EXPECT_THAT(text_of([&](Manifest& m) { second(m).offsets = {2}; }), HasSubstr("do not fit"));
  EXPECT_THAT(text_of([&](Manifest& m) { second(m).dtype = c10::ScalarType::Int; }),
              HasSubstr("differ in dtype"));
  EXPECT_THAT(text_of([&](Manifest& m) { second(m).begin = 1; }), HasSubstr("not inside of"));
  EXPECT_THAT(text_of([&](Manifest& m) { m.files[1].slices[0].checksums.push_back("c"); }),
              HasSubstr("number of checksums"));
  EXPECT_THAT(text_of([&](Manifest& m) { m.files[1].name = "../rank1"; }), HasSubstr("the name"));
  EXPECT_THAT(text_of([&](Manifest& m) { m.files[1].data = 99; }), HasSubstr("behind its end"));
  EXPECT_THAT(text_of([&](Manifest& m) { m.ranks = 0; }), HasSubstr("of 0 ranks"));
}

// Whatever bytes are changed: an Error of the caller, or a header that fits the file.
TEST(SavedManifest, ChangedBytesNeverCrash) {
  std::mt19937_64 random(5);
  const std::string whole = encode(two_rows());
  for (int i = 0; i < 2000; ++i) {
    std::string text = whole;
    for (int k = 0; k < 3; ++k) text[random() % text.size()] = static_cast<char>(random());
    try {
      parse_manifest(text);
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
    }
  }
}

}  // namespace
}  // namespace weft::checkpoint
