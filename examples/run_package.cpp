// Runs a model that was exported with `python -m amp_fx export ... --aoti`: no Python, no amp_fx.
//
//   run_package model.aoti.pt2 input.bin int64|float32 output.bin 2 32
//
// Input and output files hold raw numbers; the last arguments are the input's shape. docs/contributors/cpu-times.md says how
// to compile it.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

int main(int argc, char** argv) {
  if (argc < 6) {
    std::cerr << "usage: run_package PACKAGE INPUT int64|float32 OUTPUT SIZE...\n";
    return 2;
  }
  std::vector<int64_t> shape;
  for (int i = 5; i < argc; ++i) {
    shape.push_back(std::atoll(argv[i]));
  }
  at::Tensor input = at::empty(shape, std::string(argv[3]) == "int64" ? at::kLong : at::kFloat);
  std::ifstream(argv[2], std::ios::binary)
      .read(static_cast<char*>(input.data_ptr()), static_cast<std::streamsize>(input.nbytes()));

  torch::inductor::AOTIModelPackageLoader loader(argv[1]);
  at::Tensor output = loader.run({input}).at(0).contiguous();

  std::ofstream(argv[4], std::ios::binary)
      .write(static_cast<const char*>(output.data_ptr()), static_cast<std::streamsize>(output.nbytes()));
  std::cout << output.sizes() << " " << output.dtype() << "\n";
  return 0;
}
