// SPDX-License-Identifier: Apache-2.0
#include "dataset.h"

#include <array>
#include <charconv>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <vector>

#include <zlib.h>

namespace digits {

namespace {

[[noreturn]] void fail(const std::string& file, const std::string& why) {
  throw std::runtime_error(file + ": " + why);
}

// Reads plain and gzipped files alike.
class File {
 public:
  explicit File(std::string name)
      : name_(std::move(name)), file_(gzopen(name_.c_str(), "rb"), &gzclose) {
    if (!file_) fail(name_, "cannot be opened");
  }
  bool line(std::string& text) {
    std::array<char, 1024> buffer{};
    if (gzgets(file_.get(), buffer.data(), static_cast<int>(buffer.size())) == nullptr)
      return false;
    text = buffer.data();
    while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
    return true;
  }
  void bytes(void* to, std::size_t count) {
    if (gzread(file_.get(), to, static_cast<unsigned>(count)) != static_cast<int>(count))
      fail(name_, "is too short");
  }
  std::uint32_t big_endian() {
    std::array<std::uint8_t, 4> raw{};
    bytes(raw.data(), raw.size());
    return (std::uint32_t{raw[0]} << 24) | (std::uint32_t{raw[1]} << 16) |
           (std::uint32_t{raw[2]} << 8) | raw[3];
  }
  const std::string& name() const { return name_; }

 private:
  std::string name_;
  std::unique_ptr<gzFile_s, decltype(&gzclose)> file_;
};

// Parses one line's integers, each within its limit.
void parse_line(const std::string& file, std::size_t number, const std::string& text,
                std::vector<float>& pixels, std::vector<std::int64_t>& labels) {
  constexpr int kPixels = 64;
  const char* at = text.data();
  const char* const end = text.data() + text.size();
  for (int i = 0; i <= kPixels; ++i) {
    int value = -1;
    const auto [next, failure] = std::from_chars(at, end, value);
    const int limit = i < kPixels ? 16 : 9;
    const bool separated = i == kPixels ? next == end : next != end && *next == ',';
    if (failure != std::errc() || value < 0 || value > limit || !separated) {
      fail(file,
           "line " + std::to_string(number) + " is not 64 pixels (0 to 16) and a label (0 to 9)");
    }
    if (i < kPixels) {
      pixels.push_back(static_cast<float>(value) / 16.0f);
    } else {
      labels.push_back(value);
    }
    at = next + 1;
  }
}

std::string size_text(std::int64_t height, std::int64_t width) {
  return std::to_string(height) + "x" + std::to_string(width);
}

Images read_idx(const std::string& folder, const std::string& part) {
  const auto open = [&](const std::string& name) {
    const std::string plain = folder + "/" + name;
    if (std::filesystem::exists(plain)) return File(plain);
    if (!std::filesystem::exists(plain + ".gz")) fail(plain, "does not exist, with or without .gz");
    return File(plain + ".gz");
  };
  File images = open(part + "-images-idx3-ubyte");
  if (images.big_endian() != 0x803) fail(images.name(), "is not an IDX file of images");
  const std::int64_t count = images.big_endian();
  const std::int64_t height = images.big_endian();
  const std::int64_t width = images.big_endian();
  if (count > 1'000'000 || height > 1024 || width > 1024)
    fail(images.name(), "claims an implausible size");
  if (count == 0) fail(images.name(), "holds no images");
  if (height < 2 || width < 2) {
    fail(images.name(), "holds images of " + size_text(height, width) +
                            " pixels; the network takes 2x2 and larger ones");
  }
  File labels = open(part + "-labels-idx1-ubyte");
  if (labels.big_endian() != 0x801 || labels.big_endian() != count)
    fail(labels.name(), "does not fit its images");
  torch::Tensor raw = torch::empty({count, 1, height, width}, torch::kByte);
  images.bytes(raw.data_ptr(), static_cast<std::size_t>(raw.numel()));
  torch::Tensor raw_labels = torch::empty({count}, torch::kByte);
  labels.bytes(raw_labels.data_ptr(), static_cast<std::size_t>(count));
  if (const auto largest = raw_labels.max().item<int>(); largest > 9) {
    fail(labels.name(), "holds the label " + std::to_string(largest) + "; digits go from 0 to 9");
  }
  return {raw.to(torch::kFloat) / 255.0, raw_labels.to(torch::kLong)};
}

}  // namespace

Dataset load_digits(const std::string& file) {
  File input(file);
  std::vector<float> pixels;
  std::vector<std::int64_t> labels;
  std::string text;
  for (std::size_t number = 1; input.line(text); ++number)
    parse_line(file, number, text, pixels, labels);
  const auto count = static_cast<std::int64_t>(labels.size());
  if (count < 10) fail(file, "holds fewer than 10 images");
  const torch::Tensor all = torch::tensor(pixels).view({count, 1, 8, 8});
  const torch::Tensor all_labels = torch::tensor(labels, torch::kLong);
  // Takes every fifth image, because images of one writer are adjacent in the file: so each writer
  // is in both parts.
  const torch::Tensor is_test = torch::arange(count).remainder(5) == 4;
  const torch::Tensor is_train = is_test.logical_not();
  return {{all.index({is_train}), all_labels.index({is_train})},
          {all.index({is_test}), all_labels.index({is_test})}};
}

Dataset load_mnist(const std::string& folder) {
  Dataset dataset{read_idx(folder, "train"), read_idx(folder, "t10k")};
  const auto size_of = [](const Images& images) {
    return size_text(images.pixels.size(2), images.pixels.size(3));
  };
  if (size_of(dataset.train) != size_of(dataset.test)) {
    fail(folder, "the training images are of " + size_of(dataset.train) +
                     " pixels, those for testing of " + size_of(dataset.test));
  }
  return dataset;
}

}  // namespace digits
