#include "checkpoint.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>

namespace digits {

namespace {

[[noreturn]] void cannot_write(const std::string& file, const std::string& why) {
  throw std::runtime_error("--checkpoint: '" + file + "' cannot be written: " + why);
}

// libtorch's own texts go on for lines.
std::string first_sentence(const std::string& text) { return text.substr(0, std::min(text.find('\n'), text.find(". "))); }

std::string text_of(const std::exception& error) {
  const auto* const torch = dynamic_cast<const c10::Error*>(&error);
  return first_sentence(torch == nullptr ? error.what() : torch->what_without_backtrace());
}

std::string aside(const std::string& file) { return file + ".new"; }

}  // namespace

void check_checkpoint(const std::string& file) {
  if (file.empty()) cannot_write(file, "it has no name");
  if (std::filesystem::is_directory(file)) cannot_write(file, "it is a folder");
  if (!std::ofstream(aside(file), std::ios::binary)) cannot_write(file, std::strerror(errno));
  std::filesystem::remove(aside(file));
}

void save_checkpoint(const std::string& file, const torch::nn::Module& net, const torch::optim::Optimizer& optimizer,
                     int epochs_done) {
  torch::serialize::OutputArchive archive;
  torch::serialize::OutputArchive model;
  torch::serialize::OutputArchive state;
  net.save(model);
  optimizer.save(state);
  archive.write("model", model);
  archive.write("optimizer", state);
  archive.write("epochs", c10::IValue(static_cast<std::int64_t>(epochs_done)));
  try {
    archive.save_to(aside(file));
    std::filesystem::rename(aside(file), file);  // a run that is killed here leaves the old one whole
  } catch (const std::exception& error) {
    std::error_code ignored;
    std::filesystem::remove(aside(file), ignored);
    cannot_write(file, text_of(error));
  }
}

int load_checkpoint(const std::string& file, torch::nn::Module& net, torch::optim::Optimizer& optimizer,
                    torch::Device device) {
  if (!std::filesystem::is_regular_file(file)) {
    throw std::runtime_error("--resume: there is no checkpoint '" + file + "'; train once without it");
  }
  try {
    torch::serialize::InputArchive archive;
    archive.load_from(file, device);
    torch::serialize::InputArchive model;
    torch::serialize::InputArchive state;
    archive.read("model", model);
    archive.read("optimizer", state);
    net.load(model);
    optimizer.load(state);
    c10::IValue epochs;
    archive.read("epochs", epochs);
    return static_cast<int>(epochs.toInt());
  } catch (const std::exception& error) {
    throw std::runtime_error(
        "--resume: '" + file +
        "' is no checkpoint of this program, of images of this size, or is damaged; train once without "
        "--resume (libtorch says: " +
        text_of(error) + ")");
  }
}

}  // namespace digits
