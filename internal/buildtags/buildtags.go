// Package buildtags turns build tags into constants, so that code says
// `if buildtags.Race` and the compiler drops the branch it does not need.
package buildtags
