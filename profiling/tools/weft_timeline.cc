// SPDX-License-Identifier: Apache-2.0
// weft-timeline: summarizes the file that WEFT_TIMELINE names, and makes a page of it. (Perfetto
// and chrome://tracing open the file itself.)
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <string>

#include <CLI/CLI.hpp>

#include <weft/base/error.h>
#include <weft/base/version.h>
#include <weft/profiling/tools/command_line.h>
#include <weft/profiling/tools/html_report.h>
#include <weft/profiling/trace/merge.h>

namespace weft::tools {
namespace {

struct Options {
  std::string file;
  std::string output = "report.html";
  bool as_json = false;
  std::size_t steps = kStepsShown;
  std::optional<double> from_ms;
  std::optional<double> to_ms;
};

void summary(const Options& options) {
  const Run run = read_run(options.file);
  const Summary counted = summarize(run);
  std::printf("%s\n", options.as_json ? to_json(counted).c_str()
                                      : to_text(run, counted, options.steps).c_str());
}

void html(const Options& options) {
  const Run run = read_run(options.file);
  const Window view = window_of(run, options.from_ms, options.to_ms);
  const Window data = options.from_ms || options.to_ms ? view : whole(run);
  const std::string page = to_html(run, summarize(run), data, view,
                                   std::filesystem::path(options.file).filename().string());
  std::error_code is_new;
  if (std::filesystem::equivalent(options.output, options.file, is_new)) {
    throw Error(Blame::Caller, "the page would take the place of the timeline '" + options.file +
                                   "'; -o names another file");
  }
  std::ofstream file(options.output, std::ios::binary);
  file << page;
  file.close();
  if (!file) throw Error(Blame::Caller, "'" + options.output + "' cannot be written");
  std::printf("%s\n", options.output.c_str());
}

void merge(const Options& options) {
  const auto merged = trace::timeline::merge(options.file);
  std::printf("%d parts%s\n", merged.parts,
              merged.complete
                  ? ""
                  : "; some ranks of the job have no part, or one that did not end in good order");
}

}  // namespace
}  // namespace weft::tools

int main(int argc, char** argv) {
  weft::tools::Options options;
  CLI::App app("Analyzes the timeline of a job, the file that WEFT_TIMELINE names.",
               "weft-timeline");
  app.set_version_flag("--version", app.get_name() + " " + weft::version());
  app.require_subcommand(1);
  const auto command = [&](const char* name, const char* help) {
    CLI::App* made = app.add_subcommand(name, help);
    made->add_option("file", options.file, "The timeline")->required();
    return made;
  };
  CLI::App* const summary = command(
      "summary",
      "Print where the time of each step went, the slowest rank and link, and the longest gaps");
  summary->add_flag("--json", options.as_json, "Print a JSON object, with all steps");
  summary->add_option("--steps", options.steps, "How many of the longest steps to list; 0 for none")
      ->check(CLI::Range(0, std::numeric_limits<int>::max()))
      ->capture_default_str();
  CLI::App* const html = command(
      "html",
      "Write one page, for any browser and without a network, with all steps and the ranks' lanes");
  html->add_option("-o,--output", options.output, "The page")->capture_default_str();
  html->add_option(
      "--from", options.from_ms,
      "Only lanes from this millisecond on (default: all; the page opens at steps in the middle)");
  html->add_option("--to", options.to_ms, "Only lanes up to this millisecond");
  CLI::App* const merge = command("merge",
                                  "Make the file from the parts that the ranks have written so "
                                  "far, if no rank was left to do it");
  app.footer(
      "Exit code: 0, or 2 if the file cannot be read or written, or the command line is wrong");
  return weft::tools::run_program(app, argc, argv, [&] {
    if (summary->parsed()) weft::tools::summary(options);
    if (html->parsed()) weft::tools::html(options);
    if (merge->parsed()) weft::tools::merge(options);
    return 0;
  });
}
