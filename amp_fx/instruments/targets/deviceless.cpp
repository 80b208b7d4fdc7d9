// What torch asks C++ for when it traces autograd over fake CUDA tensors, in a build without CUDA or on a machine
// without a driver: a device guard, CUDA's hooks, and a choice of attention kernel. Nothing here is ever run on data.
// There is no way back: load it into a process of its own.
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <new>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

// one device, one stream, and nothing happens
struct Guard final : public c10::impl::DeviceGuardImplInterface {
  static Device device() {
    return Device(DeviceType::CUDA, 0);
  }
  static Stream stream() {
    return Stream(Stream::DEFAULT, device());
  }

  DeviceType type() const override {
    return DeviceType::CUDA;
  }
  Device exchangeDevice(Device) const override {
    return device();
  }
  Device getDevice() const override {
    return device();
  }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override {
    return stream();
  }
  Stream getNewStream(Device, int) const override {
    return stream();
  }
  Stream getDefaultStream(Device) const override {
    return stream();
  }
  Stream exchangeStream(Stream) const override {
    return stream();
  }
  DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override {
    return true;
  }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};

// sdp::SDPBackend
enum Backend : int64_t { kMath = 0, kFlash = 1, kEfficient = 2 };

// An assumption: flash for 16 bits without a mask, the memory-efficient kernel otherwise. A card may choose cuDNN.
int64_t choose_attention(
    const at::Tensor& query,
    const at::Tensor&,
    const at::Tensor&,
    const std::optional<at::Tensor>& mask,
    double,
    bool,
    std::optional<double>,
    bool) {
  if (query.dim() != 4 || query.scalar_type() == at::kDouble) {
    return kMath;
  }
  const bool is_low = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  return is_low && !mask.has_value() && query.sym_size(-1) <= 256 ? kFlash : kEfficient;
}

struct Hooks final : public at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override {
    return true;
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return 1;
  }
  int getNumGPUs() const override {
    return 1;
  }
  DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  DeviceIndex current_device() const override {
    return 0;
  }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override {
    return 0;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override {
    return 0;
  }
  bool hasCuDNN() const override {
    return true;
  }
  bool compiledWithCuDNN() const override {
    return true;
  }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override {
    return true;
  }
  bool supportsDilatedConvolutionWithCuDNN() const override {
    return true;
  }
  bool supportsDepthwiseConvolutionWithCuDNN() const override {
    return true;
  }
  bool supportsBFloat16RNNWithCuDNN() const override {
    return true;
  }
  long versionCuDNN() const override {
    return 91000;
  }
  long versionRuntimeCuDNN() const override {
    return 91000;
  }
  double batchnormMinEpsilonCuDNN() const override {
    return 1e-5;
  }
};

} // namespace

extern "C" void amp_fx_enter() {
  static Guard guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
  // Torch made its object when it was imported, and hands out references to it: a table of functions and no data, so
  // that another one of its kind fits in its place.
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();
}
