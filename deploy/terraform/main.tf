# The bucket, the workers' service account with least rights, and the flex template.

terraform {
  required_version = ">= 1.7"

  required_providers {
    google = {
      source  = "hashicorp/google"
      version = ">= 6.0, < 8.0"
    }
  }
}

provider "google" {
  project = var.project
  region  = var.region
}

module "naming" {
  source  = "./naming"
  name    = var.name
  project = var.project
  region  = var.region
  image   = var.image
}

resource "google_storage_bucket" "checkpoints" {
  name                        = module.naming.bucket
  location                    = var.region
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"

  lifecycle_rule {
    condition {
      age            = 7
      matches_prefix = ["tmp/"]
    }
    action {
      type = "Delete"
    }
  }
}

resource "google_service_account" "worker" {
  account_id   = module.naming.account_id
  display_name = "Tensorferry's Dataflow workers"
}

# What a worker must have on the project; everything else is per bucket.
resource "google_project_iam_member" "worker" {
  project = var.project
  role    = "roles/dataflow.worker"
  member  = google_service_account.worker.member
}

resource "google_storage_bucket_iam_member" "writes" {
  bucket = google_storage_bucket.checkpoints.name
  role   = "roles/storage.objectUser"
  member = google_service_account.worker.member
}

resource "google_storage_bucket_iam_member" "reads" {
  for_each = toset(var.source_buckets)
  bucket   = each.value
  role     = "roles/storage.objectViewer"
  member   = google_service_account.worker.member
}

# Launcher and workers pull their image with this account.
resource "google_artifact_registry_repository_iam_member" "pulls" {
  for_each   = module.naming.repositories
  project    = each.value.project
  location   = each.value.location
  repository = each.key
  role       = "roles/artifactregistry.reader"
  member     = google_service_account.worker.member
}

resource "google_service_account_iam_member" "launches" {
  for_each           = toset(var.launchers)
  service_account_id = google_service_account.worker.name
  role               = "roles/iam.serviceAccountUser"
  member             = each.value
}

resource "google_storage_bucket_object" "template" {
  name         = module.naming.template_object
  bucket       = google_storage_bucket.checkpoints.name
  content_type = "application/json"
  content = jsonencode(merge(module.naming.template, {
    metadata = jsondecode(file("${path.module}/../metadata.json"))
    defaultEnvironment = merge(module.naming.template.defaultEnvironment, {
      serviceAccountEmail = google_service_account.worker.email
    })
  }))
}
