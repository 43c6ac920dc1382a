// SPDX-License-Identifier: Apache-2.0
// Checksums, and reading what they cover: through the page cache and past it, at any offsets, with
// the damaged chunk named; also of checkpoints with SHA-256.
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <weft/engine/checkpoint/checksum.h>
#include <weft/engine/checkpoint/existing_file.h>
#include <weft/engine/checkpoint/host_memory.h>
#include <weft/engine/checkpoint/manifest.h>
#include <weft/engine/checkpoint/slice_file.h>
#include <weft/engine/checkpoint/slice_reads.h>
#include <weft/engine/checkpoint/span_reads.h>
#include <weft/engine/group/collective_error.h>
#include <weft/tests/harness/folder.h>

#include "checkpoints.h"

namespace weft::testing {
namespace {

using checkpoint::Algorithm;
using checkpoint::Checksum;
using checkpoint::checksum_of;
using checkpoint::ExistingFile;
using checkpoint::paged_bytes;
using checkpoint::Span;
using ::testing::HasSubstr;

std::string noise(std::size_t bytes) {
  std::mt19937_64 random(3);
  std::string text(bytes, '\0');
  for (std::size_t at = 0; at + 8 <= bytes; at += 8) {
    const std::uint64_t word = random();
    std::memcpy(text.data() + at, &word, 8);
  }
  return text;
}

TEST(Checksums, AreWhatOtherProgramsCompute) {
  // xxh128sum and sha256sum of "" and "abc".
  EXPECT_EQ(checksum_of(Algorithm::Xxh3, "", 0), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(checksum_of(Algorithm::Xxh3, "abc", 3), "06b05ab6733a618578af5f94892f3950");
  EXPECT_EQ(checksum_of(Algorithm::Sha256, "abc", 3),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(Checksums, PiecesGiveTheSameAsAll) {
  const std::string text = noise(100'000);
  for (const Algorithm algorithm : {Algorithm::Xxh3, Algorithm::Sha256}) {
    Checksum checksum(algorithm);
    for (std::size_t at = 0, piece = 1; at < text.size(); at += piece, piece = piece * 3 + 1) {
      piece = std::min(piece, text.size() - at);
      checksum.add(text.data() + at, piece);
    }
    EXPECT_EQ(checksum.text(), checksum_of(algorithm, text.data(), text.size()));
  }
}

TEST(Checksums, UnknownKindIsRefused) {
  for (const Algorithm algorithm : {Algorithm::Xxh3, Algorithm::Sha256})
    EXPECT_EQ(checkpoint::algorithm_of(checkpoint::name_of(algorithm)), algorithm);
  EXPECT_THAT(harness::error_of([] { checkpoint::algorithm_of("crc"); }).text(),
              HasSubstr("are of the kind 'crc'"));
}

TEST(PagedMemory, LargeTensorsBeginAtHugePagesAndCanGrow) {
  at::Tensor large = checkpoint::paged_tensor({3, 1 << 20}, at::kFloat);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(large.const_data_ptr()) % (2 << 20), 0U);
  large.fill_(2);
  large.resize_({4, 1 << 20});
  EXPECT_EQ(large.narrow(0, 0, 3).sum().item<float>(), 6 << 20);
  EXPECT_EQ(paged_bytes(0).numel(), 0);
  EXPECT_EQ(checkpoint::paged_tensor({0, 5}, at::kLong).numel(), 0);
}

// A file and some spans of it, with memory for what is wanted.
class SpanReads : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override { put(path_, content_); }

  // Wants `bytes` of the range from `begin` to `end`, beginning at `first`. `shift`: of the memory,
  // from a page.
  void want(std::uint64_t begin, std::uint64_t end, std::uint64_t first, std::uint64_t bytes,
            std::size_t shift = 0) {
    memory_.push_back(paged_bytes(bytes + shift + 1));
    memory_.back().fill_(7);
    auto* const to = static_cast<char*>(memory_.back().mutable_data_ptr()) + shift;
    checksums_.push_back(checksum_of(Algorithm::Xxh3, content_.data() + begin, end - begin));
    spans_.push_back({begin, end, first, first + bytes, to, &checksums_.back(), &name_});
  }

  std::string error() {
    ExistingFile file(path_);
    if (GetParam() && !file.go_past_page_cache()) return "no O_DIRECT";
    const auto failure =
        group::error_of([&] { checkpoint::read_spans(file, spans_, Algorithm::Xxh3); });
    return failure ? failure->text() : "";
  }

  void expect_read() {
    ASSERT_EQ(error(), "");
    for (const Span& span : spans_) {
      const std::uint64_t bytes = span.last - span.first;
      EXPECT_TRUE(std::string_view(span.to, bytes) ==
                  std::string_view(content_).substr(span.first, bytes))
          << span.begin;
      EXPECT_EQ(span.to[bytes], 7) << span.begin;  // nothing behind it was touched
    }
  }

  const harness::Folder folder_;
  const std::string path_ = folder_.path() + "/file";
  const std::string name_ = "x";
  const std::string content_ = noise((20 << 20) + 12'345);
  std::vector<Span> spans_;
  std::deque<std::string> checksums_;
  std::vector<at::Tensor> memory_;
};

TEST_P(SpanReads, AlignedAndNot) {
  constexpr std::uint64_t kMiB = 1 << 20;
  want(4'096, 4'096 + 9 * kMiB, 4'096, 9 * kMiB);                        // to its place
  want(4'096 + 9 * kMiB, 10 * kMiB, 4'096 + 9 * kMiB, kMiB - 4'096, 5);  // the memory is not
  want(10 * kMiB, 10 * kMiB + 1, 10 * kMiB, 1);                          // a byte
  want(10 * kMiB + 1, 10 * kMiB + 77, 10 * kMiB + 1, 76);
  want(10 * kMiB + 100, 12 * kMiB, 11 * kMiB, 33);       // a part, behind a short hole
  want(15 * kMiB + 7, 16 * kMiB, 15 * kMiB + 7, 4'096);  // behind a long one
  want(16 * kMiB, content_.size(), content_.size() - 1, 1);
  expect_read();
}

TEST_P(SpanReads, ManySmallOnes) {
  for (std::uint64_t at = 3; at < 600'000; at += 211) want(at, at + 211, at, 211);
  expect_read();
}

TEST_P(SpanReads, TheSameBytesTwice) {
  for (int i = 0; i < 2; ++i) want(5, 9 << 20, 5, (9 << 20) - 5);
  want(4'096, 8'192, 4'096, 4'096);
  spans_.front().checksum = nullptr;
  expect_read();
}

TEST_P(SpanReads, DamageIsNamedAndTheRestIsNotWaitedFor) {
  constexpr std::uint64_t kMiB = 1 << 20;
  for (std::uint64_t at = 0; at < 20; ++at) want(at * kMiB, (at + 1) * kMiB, at * kMiB, 9);
  {
    std::fstream stream(path_, std::ios::binary | std::ios::in | std::ios::out);
    stream.seekp(13 * kMiB + 500);
    stream.put(static_cast<char>(~content_[13 * kMiB + 500]));
  }
  EXPECT_THAT(error(), HasSubstr("'" + path_ +
                                 "' is damaged: the checksum of 'x' differs in the file's bytes "
                                 "13631488 to 14680064"));
}

TEST_P(SpanReads, ShorterFileIsNamed) {
  want(0, content_.size(), 0, content_.size());
  ExistingFile file(path_);
  if (GetParam()) file.go_past_page_cache();
  std::filesystem::resize_file(path_, 9 << 20);
  EXPECT_THAT(
      harness::error_of([&] { checkpoint::read_spans(file, spans_, Algorithm::Xxh3); }).text(),
      HasSubstr("'" + path_ + "' became shorter while it was read"));
}

INSTANTIATE_TEST_SUITE_P(PageCache, SpanReads, ::testing::Bool(),
                         [](const auto& direct) { return direct.param ? "Past" : "Through"; });

TEST(SliceReads, PartsOfChunks) {
  const harness::Folder folder;
  const std::uint64_t bytes = checkpoint::kChunk + (3 << 20);
  const at::Tensor data = paged_bytes(bytes);
  const std::string text = noise(bytes);
  std::memcpy(data.mutable_data_ptr(), text.data(), bytes);
  checkpoint::SavedSlice saved;
  saved.slice = {"large", at::kByte, {static_cast<std::int64_t>(bytes)}, {0}, 0, bytes};
  checkpoint::Manifest manifest;
  manifest.ranks = 1;
  manifest.files = {checkpoint::write_slices(checkpoint::OpenFolder(folder.path()), "file", {saved},
                                             data.const_data_ptr(), bytes)};
  EXPECT_EQ(manifest.files.front().slices.front().checksums.size(), 2U);
  EXPECT_EQ(manifest.files.front().data % 4'096, 0U);
  const auto tensors = checkpoint::tensors_of(manifest);
  using Rows = std::pair<std::uint64_t, std::uint64_t>;
  for (const auto& [from, size] :
       {Rows{0, 1}, Rows{bytes - 1, 1}, Rows{checkpoint::kChunk - 5, 2 << 20},
        Rows{(1 << 20) + 7, checkpoint::kChunk}, Rows{0, bytes}}) {
    for (const bool is_shared : {false, true}) {
      const at::Tensor rows = paged_bytes(size);
      std::vector<checkpoint::SliceRead> reads;
      checkpoint::add_reads(tensors.at("large"), rows, static_cast<std::int64_t>(from), is_shared,
                            reads);
      checkpoint::read_slices(folder.path(), std::move(reads));
      EXPECT_TRUE(rows.equal(
          data.narrow(0, static_cast<std::int64_t>(from), static_cast<std::int64_t>(size))))
          << from;
    }
  }
}

// Rewrites a checkpoint's manifest as Weft wrote it when checksums were SHA-256.
void make_older(const std::string& checkpoint) {
  const auto manifest = checkpoint::parse_manifest(read_file(checkpoint + "/manifest"));
  nlohmann::json all = nlohmann::json::parse(read_file(checkpoint + "/manifest"));
  all["version"] = 2;
  for (auto& file : all["files"]) {
    const std::string bytes = content_of(checkpoint + "/" + file["name"].get<std::string>());
    const auto sha256 = [&](std::uint64_t begin, std::uint64_t size) {
      return checksum_of(Algorithm::Sha256, bytes.data() + begin, size);
    };
    file.erase("checksum");
    file.erase("header_checksum");
    const auto data = file["data"].get<std::uint64_t>();
    file["header_sha256"] = sha256(0, data);
    const auto& saved = *std::ranges::find(manifest.files, file["name"].get<std::string>(),
                                           &checkpoint::SavedFile::name);
    for (std::size_t i = 0; i < saved.slices.size(); ++i) {
      const auto& slice = saved.slices[i].slice;
      file["slices"][i].erase("checksums");
      file["slices"][i]["sha256"] = nlohmann::json::array();
      if (slice.bytes > 0)
        file["slices"][i]["sha256"].push_back(sha256(data + slice.begin, slice.bytes));
    }
  }
  write_file(checkpoint + "/manifest", all.dump());
}

TEST(OlderCheckpoint, WithSha256LoadsAndIsCompared) {
  const harness::Folder folder;
  const std::string run = folder.path() + "/run";
  harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
    torch::Tensor large = torch::arange(600'000);
    checkpoint::save_async(run, group, {{"large", large}}).wait();
    if (group.rank() == 0) make_older(run + "/1");
    harness::meet(group);
    large.zero_();
    checkpoint::load(run, group, {{"large", large}});
    EXPECT_TRUE(large.equal(torch::arange(600'000)));
    harness::meet(group);
    if (group.rank() == 0) {
      std::string bytes = content_of(run + "/1/rank00000.safetensors");
      bytes.back() ^= 1;
      put(run + "/1/rank00000.safetensors", bytes);
    }
    harness::meet(group);
    EXPECT_THAT(refused(group, Blame::Caller,
                        [&] {
                          checkpoint::load(run, group, {{"large", large}});
                        }),
                HasSubstr("is damaged: the checksum of 'large' differs in the file's bytes"));
  });
}

}  // namespace
}  // namespace weft::testing
