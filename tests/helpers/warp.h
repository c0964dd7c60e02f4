// Stands in for a GPU: what differs from lane to lane is a vector of 32, so that a kernel written for CUDA runs on a CPU.
#include <cmath>
#include <cstring>
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(a)
#define __shared__
#define __align__(a)
#define __syncthreads()
typedef CELL cell;
struct D3 {int x,y,z;}; static D3 blockIdx, blockDim, threadIdx; static int WARP;
template<class T> struct Vec { T v[32]; Vec(){} template<class U> Vec(U s){for(int k=0;k<32;k++) v[k]=(T)s;}
 template<class U> Vec(const Vec<U>&o){for(int k=0;k<32;k++) v[k]=(T)o.v[k];} 
 Vec& operator+=(const Vec&o){for(int k=0;k<32;k++) v[k]+=o.v[k];return *this;}
 Vec& operator*=(const Vec&o){for(int k=0;k<32;k++) v[k]*=o.v[k];return *this;} };
typedef Vec<cell> real; typedef Vec<int> lane_int; typedef Vec<long long> lane_long; typedef Vec<bool> lane_bool; typedef Vec<double> lane_double;
#define OP(o) template<class T> Vec<T> operator o(const Vec<T>&a,const Vec<T>&b){Vec<T> r; for(int k=0;k<32;k++) r.v[k]=a.v[k] o b.v[k]; return r;} \
 template<class T,class S> Vec<T> operator o(const Vec<T>&a,S b){Vec<T> r; for(int k=0;k<32;k++) r.v[k]=a.v[k] o (T)b; return r;} \
 template<class T,class S> Vec<T> operator o(S a,const Vec<T>&b){Vec<T> r; for(int k=0;k<32;k++) r.v[k]=(T)a o b.v[k]; return r;}
OP(+) OP(-) OP(*) OP(/) OP(%)
template<class T> Vec<T> operator-(const Vec<T>&a){Vec<T> r; for(int k=0;k<32;k++) r.v[k]=-a.v[k]; return r;}
lane_long operator+(const lane_long&a,const lane_int&b){lane_long r; for(int k=0;k<32;k++) r.v[k]=a.v[k]+b.v[k]; return r;}
#define CMP(o) template<class T> lane_bool operator o(const Vec<T>&a,int b){lane_bool r; for(int k=0;k<32;k++) r.v[k]=a.v[k] o b; return r;}
CMP(<) CMP(>=) CMP(==)
lane_bool operator==(const lane_int&a,const lane_int&b){lane_bool r; for(int k=0;k<32;k++) r.v[k]=a.v[k]==b.v[k]; return r;}
lane_bool operator&&(const lane_bool&a,const lane_bool&b){lane_bool r; for(int k=0;k<32;k++) r.v[k]=a.v[k]&&b.v[k]; return r;}
struct lane_ptr { const cell* p[32]; lane_ptr(){} lane_ptr(const cell*q){for(int k=0;k<32;k++) p[k]=q;}
 real operator[](int o) const {real r; for(int k=0;k<32;k++) r.v[k]=p[k][o]; return r;} };
lane_ptr operator+(const lane_ptr&a,const lane_int&b){lane_ptr r; for(int k=0;k<32;k++) r.p[k]=a.p[k]+b.v[k]; return r;}
lane_ptr operator+(const cell*a,const lane_int&b){return lane_ptr(a)+b;}
struct real2 {real x,y;}; real2 two_at(const lane_ptr&a,int k){return {a[k],a[k+1]};}
template<class T> Vec<T> up(const Vec<T>&a,int d){Vec<T> r; for(int k=0;k<32;k++) r.v[k]=a.v[k>=d?k-d:k]; return r;}
template<class T> Vec<T> down(const Vec<T>&a,int d){Vec<T> r; for(int k=0;k<32;k++) r.v[k]=a.v[k+d<32?k+d:k]; return r;}
#define F1(n,e) real n(const real&a){real r; for(int k=0;k<32;k++){cell x=a.v[k]; r.v[k]=e;} return r;}
F1(root,std::sqrt(x)) F1(over,(cell)1/x) F1(over_root,(cell)1/std::sqrt(x)) F1(sat,x<0?(cell)0:x>1?(cell)1:x) F1(apart,x>(sizeof(cell)==4?(cell)4e-7:(cell)1e-15)?x:(cell)0) F1(size_of,std::fabs(x))
real fused(const real&a,const real&b,const real&c){real r; for(int k=0;k<32;k++) r.v[k]=std::fma(a.v[k],b.v[k],c.v[k]); return r;}
real sign_of(const real&a,const real&b){real r; for(int k=0;k<32;k++) r.v[k]=std::copysign(a.v[k],b.v[k]); return r;}
real below(const real&x,double bound,const real&a,const real&b){real r; for(int k=0;k<32;k++) r.v[k]=x.v[k]<(cell)bound?a.v[k]:b.v[k]; return r;}
lane_int lane_number(){lane_int r; for(int k=0;k<32;k++) r.v[k]=k; return r;}
static inline int min(int a,int b){return a<b?a:b;}
int warp_number(){return WARP;}
lane_int least(const lane_int&a,int b){lane_int r; for(int k=0;k<32;k++) r.v[k]=a.v[k]<b?a.v[k]:b; return r;}
lane_long far(const lane_int&a){return a;}
real one_if(const lane_bool&a){return a;}
lane_int take(const int*f,const lane_int&k){lane_int r; for(int j=0;j<32;j++) r.v[j]=f[k.v[j]]; return r;}
real take(const cell*f,const lane_long&k){real r; for(int j=0;j<32;j++) r.v[j]=f[k.v[j]]; return r;}
lane_ptr place(const cell*f,const lane_int&k,int s){lane_ptr r; for(int j=0;j<32;j++) r.p[j]=f+(long long)k.v[j]*s; return r;}
void copy(cell*to,const cell*from,int n,int){memcpy(to,from,n*sizeof(cell));}
template<class T> void put(T*to,const lane_long&k,const Vec<T>&v,const lane_bool&m){for(int j=0;j<32;j++) if(m.v[j]) to[k.v[j]]=v.v[j];}

static unsigned char space_[1<<20]; 
